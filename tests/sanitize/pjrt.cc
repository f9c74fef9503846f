// Driver: the PJRT plugin over tiny_host.cc, as JAX would use it: compile, execute from many
// threads, chain, donate, delete early, fail everywhere, serialise, end.
//
//     pjrt HOST address|copy|auto [old|metal]
//
// metal: the host is like jax-metal, and one handler takes its objects.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plugin/ffi/native_buffers.h"
#include "plugin/pjrt/custom_call/handler_registry.h"
#include "plugin/pjrt/pjrt_api.h"
#include "plugin/pjrt/pjrt_c_api.h"
#include "plugin/pjrt/plan.h"
#include "tests/plugin/device/fake_metal/fake_metal.h"
#include "tests/sanitize/specs.h"

extern "C" {
void* Scale(void* frame);
void* Fail(void* frame);
void* Throw(void* frame);
void* Async(void* frame);
void* Pool(void* frame);
}

namespace jfm::pjrt {
namespace {

constexpr int64_t kSize = 37;  // elements of every array
const std::string kArray = "f32 " + std::to_string(kSize);

// -- Plans and programs ---------------------------------------------------------------

class Writer {
 public:
  std::string text;

  void Int(int64_t value) { text.append(reinterpret_cast<const char*>(&value), sizeof(value)); }
  void Bytes(const std::string& bytes) {
    Int(static_cast<int64_t>(bytes.size()));
    text += bytes;
  }
  template <class Items, class Write>
  void List(const Items& items, Write&& write) {
    Int(static_cast<int64_t>(items.size()));
    for (const auto& item : items) write(item);
  }
  template <class Items>
  void Ints(const Items& items) {
    List(items, [this](auto item) { Int(static_cast<int64_t>(item)); });
  }

  void Write(const Attributes& attributes) {
    List(attributes, [this](const auto& attribute) {
      Bytes(attribute.first);
      const AttributeValue& value = attribute.second;
      Int(static_cast<int64_t>(value.kind));
      if (value.kind == AttributeKind::kDictionary) return Write(value.entries);
      if (value.kind != AttributeKind::kString) Int(value.dtype);
      if (value.kind == AttributeKind::kArray) Int(value.count);
      Bytes(value.data);
    });
  }
  void Write(const std::vector<TensorType>& types) {
    List(types, [this](const TensorType& type) {
      Int(type.dtype);
      Ints(type.dims);
    });
  }
  void Write(const PlannedCall& call) {
    Bytes(call.spec.target);
    Write(call.spec.attributes);
    Write(call.spec.operands);
    Write(call.spec.results);
    List(call.aliases, [this](const auto& alias) {
      Int(static_cast<int64_t>(alias.first));
      Int(static_cast<int64_t>(alias.second));
    });
    Int(0);  // no side effects
  }
  void Write(const Step& step) {
    const bool has_index = step.kind == StepKind::kSegment || step.kind == StepKind::kCall;
    Int(static_cast<int64_t>(step.kind));
    Int(has_index ? static_cast<int64_t>(step.index) : -1);
    Ints(step.inputs);
    Ints(step.outputs);
    Ints(step.donated);
    Ints(step.dead);
    Ints(step.blocks);
    Int(static_cast<int64_t>(step.num_captures));
  }
  void Write(const Block& block) {
    Int(static_cast<int64_t>(block.num_values));
    Ints(block.inputs);
    Ints(block.outputs);
    Ints(block.donated);
    List(block.steps, [this](const Step& step) { Write(step); });
  }
  void Write(const Plan& plan) {
    Int(1);
    Bytes(plan.fingerprint);
    Bytes(plan.program);
    Bytes(plan.shadow);
    Bytes(plan.options);
    List(plan.segments, [this](const std::string& segment) { Bytes(segment); });
    List(plan.calls, [this](const PlannedCall& call) { Write(call); });
    List(plan.blocks, [this](const Block& block) { Write(block); });
    Int(plan.constants_segment);
    Ints(plan.constants);
    Int(plan.peak_intermediate_bytes);
  }
};

struct Reply {
  int kind = JFM_REPLY_UNCHANGED;
  int code = 0;
  std::string data;
};
std::map<std::string, Reply> replies;  // by the program's text; not changed once threads run

void Partition(const char* program, size_t size, const char*, size_t, void* sink) {
  const auto found = replies.find(std::string(program, size));
  // An old host's plugin asks about every program.
  const Reply reply = found != replies.end() ? found->second : Reply{};
  if (reply.kind < 0) return;  // never answers
  jfm_pjrt_reply(sink, reply.kind, reply.code, reply.data.data(), reply.data.size());
}

std::string ProgramName(const std::string& name) { return "custom_call " + name; }

PlannedCall CallOf(const std::string& target, Attributes attributes) {
  PlannedCall call;
  call.spec = {target, std::move(attributes), {Floats({kSize})}, {Floats({kSize})}};
  return call;
}

Step MakeStep(StepKind kind, size_t index, std::vector<ValueId> inputs,
              std::vector<ValueId> outputs, std::vector<ValueId> dead = {}) {
  Step step;
  step.kind = kind;
  step.index = index;
  step.inputs = std::move(inputs);
  step.outputs = std::move(outputs);
  step.dead = std::move(dead);
  return step;
}

std::string Arrays(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += "in " + kArray + "\n";
  return text;
}

std::string Shadow(int inputs, int outputs) {
  std::string text = Arrays(inputs);
  text += "const " + kArray + " 0\n";
  for (int i = 0; i < outputs; ++i) text += "out " + std::to_string(inputs) + "\n";
  return text;
}

Plan NewPlan(int inputs, int outputs) {
  Plan plan;
  plan.fingerprint = "a fingerprint";
  plan.shadow = Shadow(inputs, outputs);
  plan.blocks.emplace_back();
  for (int i = 0; i < inputs; ++i) plan.blocks[0].inputs.push_back(i);
  return plan;
}

void AddPlan(const std::string& name, Plan plan) {
  plan.program = ProgramName(name);
  Writer writer;
  writer.Write(plan);
  replies[plan.program] = {JFM_REPLY_PLAN, 0, writer.text};
}

Attributes AsyncOptions(const std::string& error) {
  return {{"delay_ms", Int(1)}, {"error", Text(error)}};
}

// (x, w) -> 2xw + x + 7, x itself, that again, and the constant 7.
Plan Chain() {
  Plan plan = NewPlan(2, 4);
  plan.segments = {Arrays(2) + "mul 0 1\nout 2\n", Arrays(3) + "add 0 1\nadd 3 2\nout 4\n",
                   "const " + kArray + " 7\nout 0\n"};
  plan.calls = {CallOf("Scale", {{"factor", Float(2)}})};
  plan.constants_segment = 2;
  plan.constants = {5};
  Block& main = plan.blocks[0];
  main.num_values = 6;
  main.outputs = {4, 0, 4, 5};
  main.steps = {MakeStep(StepKind::kSegment, 0, {0, 1}, {2}, {1}),
                MakeStep(StepKind::kCall, 0, {2}, {3}, {2}),
                MakeStep(StepKind::kSegment, 1, {3, 0, 5}, {4}, {3})};
  return plan;
}

// () -> the constant 7 and 1 by a call: every execution reads the same buffer, and takes
// long enough for others to do so meanwhile.
Plan ConstantCall() {
  Plan plan = NewPlan(0, 1);
  plan.segments = {"const " + kArray + " 7\nout 0\n"};
  plan.calls = {CallOf("Async", AsyncOptions(""))};
  plan.constants_segment = 0;
  plan.constants = {0};
  Block& main = plan.blocks[0];
  main.num_values = 2;
  main.outputs = {1};
  main.steps = {MakeStep(StepKind::kCall, 0, {0}, {1})};
  return plan;
}

// (x) -> x + 1 by a call, and then x added by the host.
Plan ReadLate() {
  Plan plan = NewPlan(1, 1);
  plan.segments = {Arrays(2) + "add 0 1\nout 2\n"};
  plan.calls = {CallOf("Async", AsyncOptions(""))};
  Block& main = plan.blocks[0];
  main.num_values = 3;
  main.outputs = {2};
  main.steps = {MakeStep(StepKind::kCall, 0, {0}, {1}),
                MakeStep(StepKind::kSegment, 0, {0, 1}, {2}, {1})};
  return plan;
}

// (x) -> x with 1 added by the host and doubled by a call until it is at least 100. Every
// memory is reused where it can be.
Plan Loop() {
  Plan plan = NewPlan(1, 1);
  plan.segments = {Arrays(1) + "less 0 100\nout 1\n", Arrays(2) + "add 0 1\nout 2\ndonate 0\n",
                   "const " + kArray + " 1\nout 0\n"};
  plan.calls = {CallOf("Scale", {{"factor", Float(2)}})};
  plan.calls[0].aliases = {{0, 0}};
  plan.blocks.resize(3);
  Block& main = plan.blocks[0];
  main.num_values = 3;
  main.outputs = {2};
  main.donated = {0};
  Step loop = MakeStep(StepKind::kWhile, 0, {1, 0}, {2}, {0, 1});
  loop.blocks = {1, 2};
  loop.num_captures = 1;
  main.steps = {MakeStep(StepKind::kSegment, 2, {}, {1}), loop};
  Block& condition = plan.blocks[1];
  condition.num_values = 3;
  condition.inputs = {0, 1};
  condition.outputs = {2};
  condition.steps = {MakeStep(StepKind::kSegment, 0, {1}, {2})};
  Block& body = plan.blocks[2];
  body.num_values = 4;
  body.inputs = {0, 1};
  body.outputs = {3};
  Step add = MakeStep(StepKind::kSegment, 1, {1, 0}, {2}, {1});
  add.donated = {0};
  body.steps = {add, MakeStep(StepKind::kCall, 0, {2}, {3}, {2})};
  return plan;
}

// (x) -> a call times two, or x unchanged, or three: by the index x[0]; then by x[0] < 5
// the same again.
Plan Branches() {
  Plan plan = NewPlan(1, 2);
  plan.segments = {Arrays(1) + "index 0 0\nless 0 5\nout 1\nout 2\n",
                   "const " + kArray + " 3\nout 0\n"};
  plan.calls = {CallOf("Scale", {{"factor", Float(2)}})};
  plan.blocks.resize(4);
  Block& main = plan.blocks[0];
  main.num_values = 5;
  main.outputs = {3, 4};
  Step by_index = MakeStep(StepKind::kCase, 0, {1, 0}, {3}, {1});
  by_index.blocks = {1, 2, 3};
  by_index.num_captures = 1;
  Step by_flag = MakeStep(StepKind::kIf, 0, {2, 0}, {4}, {2});
  by_flag.blocks = {1, 3};
  by_flag.num_captures = 1;
  main.steps = {MakeStep(StepKind::kSegment, 0, {0}, {1, 2}), by_index, by_flag};
  for (int i = 1; i <= 3; ++i) {
    Block& branch = plan.blocks[static_cast<size_t>(i)];
    branch.num_values = 2;
    branch.inputs = {0};
    branch.outputs = {i == 2 ? 0 : 1};
  }
  plan.blocks[1].steps = {MakeStep(StepKind::kCall, 0, {0}, {1})};
  plan.blocks[3].steps = {MakeStep(StepKind::kSegment, 1, {}, {1})};
  return plan;
}

// (x) -> host, call, host, where one of the three is what the test wants it to be.
Plan Line(const std::string& before, PlannedCall call, const std::string& after) {
  Plan plan = NewPlan(1, 1);
  plan.segments = {Arrays(1) + before + "add 0 0\nout 1\n", Arrays(1) + after + "add 0 0\nout 1\n"};
  plan.calls = {std::move(call)};
  Block& main = plan.blocks[0];
  main.num_values = 4;
  main.outputs = {3};
  main.steps = {MakeStep(StepKind::kSegment, 0, {0}, {1}),
                MakeStep(StepKind::kCall, 0, {1}, {2}, {1}),
                MakeStep(StepKind::kSegment, 1, {2}, {3}, {2})};
  return plan;
}

PlannedCall FailingCall(const std::string& target, Attributes attributes) {
  PlannedCall call = CallOf(target, std::move(attributes));
  call.spec.operands.clear();
  call.spec.results = {Ints({})};
  return call;
}

// (x) -> x + x, but between comes a call that fails.
Plan FailingLine(const std::string& target, Attributes attributes) {
  Plan plan = NewPlan(1, 1);
  plan.segments = {Arrays(1) + "add 0 0\nout 1\n"};
  plan.calls = {FailingCall(target, std::move(attributes))};
  Block& main = plan.blocks[0];
  main.num_values = 3;
  main.outputs = {1};
  main.steps = {MakeStep(StepKind::kSegment, 0, {0}, {1}),
                MakeStep(StepKind::kCall, 0, {}, {2}, {2})};
  return plan;
}

void AddPlans() {
  AddPlan("chain", Chain());
  AddPlan("constant call", ConstantCall());
  AddPlan("read late", ReadLate());
  AddPlan("loop", Loop());
  AddPlan("branches", Branches());
  const PlannedCall scale = CallOf("Scale", {{"factor", Float(2)}});
  AddPlan("async", Line("", CallOf("Async", AsyncOptions("")), ""));
  AddPlan("async fails", Line("", CallOf("Async", AsyncOptions("lost")), ""));
  AddPlan("host fails first", Line("fail\n", scale, ""));
  AddPlan("host fails last", Line("", scale, "fail\n"));
  AddPlan("host refuses", Line("refuse\n", scale, ""));
  AddPlan("host rejects", Line("", scale, "reject\n"));
  AddPlan("call fails", FailingLine("Fail", {{"code", Int32(9)}, {"message", Text("mine")}}));
  AddPlan("call throws", FailingLine("Throw", {{"what", Text("runtime_error")}}));
  AddPlan("unknown target", Line("", CallOf("nobody", {}), ""));
  replies[ProgramName("unchanged")] = {JFM_REPLY_UNCHANGED, 0, ""};
  replies[ProgramName("rewritten")] = {JFM_REPLY_REWRITTEN, 0, Arrays(1) + "add 0 0\nout 1\n"};
  replies[ProgramName("refused")] = {JFM_REPLY_ERROR, 12, "not partitioned"};
  replies[ProgramName("no answer")] = {-1, 0, ""};
  Writer writer;
  writer.Write(Branches());
  for (size_t size = 0; size < writer.text.size(); size += 5) {
    replies[ProgramName("cut at " + std::to_string(size))] = {JFM_REPLY_PLAN, 0,
                                                              writer.text.substr(0, size)};
  }
}

// -- The API, in short -----------------------------------------------------------------

const PJRT_Api* api = nullptr;
PJRT_Client* client = nullptr;
PJRT_Device* device = nullptr;

template <class Args>
Status Ask(Args& args) {
  args.struct_size = sizeof(Args);
  PJRT_Error* error = api->slots[static_cast<size_t>(Args::kSlot)](&args);
  if (error == nullptr) return {};
  PJRT_Error_Message_Args message = {};
  PJRT_Error_GetCode_Args code = {};
  message.error = code.error = error;
  CheckOk(Ask(message));
  CheckOk(Ask(code));
  Status status(static_cast<Code>(code.code), std::string(message.message, message.message_size));
  PJRT_Error_Destroy_Args destroy = {};
  destroy.error = error;
  CheckOk(Ask(destroy));
  return status;
}

Result<PJRT_LoadedExecutable*> Compile(const std::string& text) {
  PJRT_Program program = {};
  program.struct_size = sizeof(program);
  program.code = const_cast<char*>(text.data());
  program.code_size = text.size();
  program.format = "mlir";
  program.format_size = 4;
  PJRT_Client_Compile_Args args = {};
  args.client = client;
  args.program = &program;
  if (Status status = Ask(args); !status.ok()) return status;
  return args.executable;
}

void Destroy(PJRT_LoadedExecutable* executable) {
  PJRT_LoadedExecutable_Destroy_Args args = {};
  args.executable = executable;
  CheckOk(Ask(args));
}

class Executable {
 public:
  explicit Executable(const std::string& text) {
    Result<PJRT_LoadedExecutable*> executable = Compile(text);
    CheckOk(executable.status());
    handle = *executable;
  }
  ~Executable() { Destroy(handle); }
  Executable(const Executable&) = delete;
  Executable& operator=(const Executable&) = delete;

  PJRT_LoadedExecutable* handle;
};

// Destroys the handle; what is pending may go on.
class Array {
 public:
  explicit Array(PJRT_Buffer* handle) : handle_(handle) {}
  explicit Array(float value) {
    const std::vector<float> data(kSize, value);
    PJRT_Client_BufferFromHostBuffer_Args args = {};
    args.client = client;
    args.data = data.data();
    args.type = PJRT_BufferType_F32;
    args.dims = &kSize;
    args.num_dims = 1;
    args.device = device;
    CheckOk(Ask(args));
    handle_ = args.buffer;
    PJRT_Event_Destroy_Args destroy = {};
    destroy.event = args.done_with_host_buffer;
    CheckOk(Ask(destroy));
  }
  Array(Array&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Array& operator=(Array&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Array() {
    if (handle_ == nullptr) return;
    PJRT_Buffer_Destroy_Args args = {};
    args.buffer = handle_;
    CheckOk(Ask(args));
  }

  PJRT_Buffer* handle() const { return handle_; }
  void Delete() {
    PJRT_Buffer_Delete_Args args = {};
    args.buffer = handle_;
    CheckOk(Ask(args));
  }
  bool IsDeleted() const {
    PJRT_Buffer_IsDeleted_Args args = {};
    args.buffer = handle_;
    CheckOk(Ask(args));
    return args.is_deleted;
  }
  PJRT_Event* ReadyEvent() const {
    PJRT_Buffer_ReadyEvent_Args args = {};
    args.buffer = handle_;
    CheckOk(Ask(args));
    return args.event;
  }
  Status Await() const { return AwaitEvent(ReadyEvent()); }
  // All elements are the same.
  Result<float> Value() const {
    std::vector<float> data(kSize);
    PJRT_Buffer_ToHostBuffer_Args args = {};
    args.src = handle_;
    args.dst = data.data();
    args.dst_size = kSize * sizeof(float);
    if (Status status = Ask(args); !status.ok()) return status;
    if (Status status = AwaitEvent(args.event); !status.ok()) return status;
    CHECK(std::count(data.begin(), data.end(), data[0]) == kSize);
    return data[0];
  }
  void CheckValue(float expected) const {
    const Result<float> value = Value();
    CheckOk(value.status());
    CHECK(*value == expected);
  }

  static Status AwaitEvent(PJRT_Event* event) {
    PJRT_Event_Await_Args args = {};
    args.event = event;
    Status status = Ask(args);
    PJRT_Event_Destroy_Args destroy = {};
    destroy.event = event;
    CheckOk(Ask(destroy));
    return status;
  }

 private:
  PJRT_Buffer* handle_ = nullptr;
};

Result<std::vector<Array>> Execute(PJRT_LoadedExecutable* executable,
                                   const std::vector<const Array*>& inputs, size_t num_outputs,
                                   bool with_event = false) {
  std::vector<PJRT_Buffer*> handles;
  for (const Array* input : inputs) handles.push_back(input->handle());
  std::vector<PJRT_Buffer*> outputs(num_outputs);
  PJRT_Buffer* const* input_lists[] = {handles.data()};
  PJRT_Buffer** output_lists[] = {outputs.data()};
  PJRT_Event* event = nullptr;
  PJRT_ExecuteOptions options = {};
  options.struct_size = sizeof(options);
  PJRT_LoadedExecutable_Execute_Args args = {};
  args.executable = executable;
  args.options = &options;
  args.argument_lists = input_lists;
  args.num_devices = 1;
  args.num_args = inputs.size();
  args.output_lists = output_lists;
  args.device_complete_events = with_event ? &event : nullptr;
  if (Status status = Ask(args); !status.ok()) return status;
  std::vector<Array> arrays;
  for (PJRT_Buffer* output : outputs) arrays.emplace_back(output);
  if (with_event) {
    const Status done = Array::AwaitEvent(event);
    for (const Array& array : arrays) CHECK(array.Await().code() == done.code());
  }
  return arrays;
}

int64_t Statistic(const std::string& key) {
  char text[1024];
  CHECK(jfm_pjrt_statistics(text, sizeof(text)) == 0);
  const char* const found = std::strstr(text, (key + "=").c_str());
  CHECK(found != nullptr);
  return std::atoll(found + key.size() + 1);
}

// -- Tests ------------------------------------------------------------------------------

constexpr int kThreads = 6;
constexpr int kRepeats = 15;

void RunChain(PJRT_LoadedExecutable* executable, int seed) {
  const auto x_value = static_cast<float>(seed);
  auto x = std::make_unique<Array>(x_value);
  auto w = std::make_unique<Array>(3.0f);
  Result<std::vector<Array>> outputs =
      Execute(executable, {x.get(), w.get()}, 4, /*with_event=*/seed % 3 == 0);
  CheckOk(outputs.status());
  // The caller may do with its arguments what it likes at once.
  if (seed % 2 == 0) {
    x->Delete();
    w = nullptr;
  }
  if (seed % 4 == 0) x = nullptr;
  const float expected = 7 * x_value + 7;
  (*outputs)[0].CheckValue(expected);
  (*outputs)[1].CheckValue(x_value);
  (*outputs)[2].CheckValue(expected);
  (*outputs)[3].CheckValue(7);
}

void Straight() {
  const Executable chain(ProgramName("chain"));
  InThreads(kThreads, [&](int thread) {
    for (int i = 0; i < kRepeats; ++i) RunChain(chain.handle, thread * kRepeats + i);
  });
  for (int i = 0; i < kRepeats; ++i) {
    // Anew each time: what the first execution finds out is kept with the constant.
    const Executable constant_call(ProgramName("constant call"));
    InThreads(kThreads, [&](int) {
      Result<std::vector<Array>> outputs = Execute(constant_call.handle, {}, 1);
      CheckOk(outputs.status());
      (*outputs)[0].CheckValue(8);
    });
  }
}

// Results that are not there yet are the next call's arguments, and nobody waits.
void Chained() {
  const Executable async(ProgramName("async"));
  const Executable on_host(Arrays(2) + "add 0 1\nout 2\n");
  InThreads(kThreads, [&](int) {
    Array value(1.0f);
    for (int i = 0; i < 6; ++i) {
      Result<std::vector<Array>> next = Execute(async.handle, {&value}, 1);
      CheckOk(next.status());
      value = std::move((*next)[0]);
      if (i % 2 == 0) {
        next = Execute(on_host.handle, {&value, &value}, 1);
        CheckOk(next.status());
        value = std::move((*next)[0]);
      }
    }
    float expected = 1;  // the call adds 1, and the host doubles before and after it
    for (int i = 0; i < 6; ++i) expected = 2 * (2 * expected + 1) * (i % 2 == 0 ? 2 : 1);
    value.CheckValue(expected);
  });
}

void Loops() {
  const Executable loop(ProgramName("loop"));
  InThreads(kThreads, [&](int thread) {
    for (int i = 0; i < kRepeats; ++i) {
      float expected = static_cast<float>(thread);
      const Array x(expected);
      Result<std::vector<Array>> outputs = Execute(loop.handle, {&x}, 1);
      CheckOk(outputs.status());
      CHECK(x.IsDeleted());
      CheckError(Execute(loop.handle, {&x}, 1).status(), Code::kInvalidArgument, "deleted");
      while (expected < 100) expected = 2 * (expected + 1);
      (*outputs)[0].CheckValue(expected);
    }
  });
}

void Branching() {
  const Executable branches(ProgramName("branches"));
  InThreads(kThreads, [&](int thread) {
    for (int i = 0; i < kRepeats; ++i) {
      const auto x_value = static_cast<float>((thread + i) % 7 - 1);
      const Array x(x_value);
      Result<std::vector<Array>> outputs = Execute(branches.handle, {&x}, 2);
      CheckOk(outputs.status());
      const float by_index = x_value == 0 ? 2 * x_value : x_value == 1 ? x_value : 3;
      (*outputs)[0].CheckValue(by_index);
      (*outputs)[1].CheckValue(x_value < 5 ? 2 * x_value : 3);
    }
  });
}

// One output fails, or the execution itself does.
void CheckExecutionFails(const std::string& name, Code code, const std::string& message) {
  const Executable executable(ProgramName(name));
  InThreads(3, [&](int thread) {
    for (int i = 0; i < 5; ++i) {
      const Array x(1.0f);
      Result<std::vector<Array>> outputs =
          Execute(executable.handle, {&x}, 1, /*with_event=*/thread == 0);
      if (!outputs.ok()) {
        CheckError(outputs.status(), code, message);
        continue;
      }
      CheckError((*outputs)[0].Await(), code, message);
      CheckError((*outputs)[0].Value().status(), code, message);
      // An argument that failed.
      Result<std::vector<Array>> next = Execute(executable.handle, {&(*outputs)[0]}, 1);
      CheckError(next.ok() ? (*next)[0].Await() : next.status(), code, message);
    }
  });
}

void ExecutionErrors() {
  CheckExecutionFails("host fails first", Code::kAborted, "the host's execution failed");
  CheckExecutionFails("host fails last", Code::kAborted, "the host's execution failed");
  CheckExecutionFails("host refuses", Code::kUnavailable, "the host refuses");
  CheckExecutionFails("call fails", Code::kFailedPrecondition, "[execute] mine");
  CheckExecutionFails("call throws", Code::kInternal, "a thrown message");
  CheckExecutionFails("async fails", Code::kDataLoss, "[execute] lost");
  const Executable chain(ProgramName("chain"));
  const Array x(1.0f);
  CheckError(Execute(chain.handle, {&x}, 4).status(), Code::kInvalidArgument, "takes 2 arguments");
  const Array gone(1.0f);
  PJRT_Buffer_Delete_Args args = {};
  args.buffer = gone.handle();
  CheckOk(Ask(args));
  Result<std::vector<Array>> outputs = Execute(chain.handle, {&gone, &x}, 4);
  CHECK(!(outputs.ok() ? (*outputs)[0].Await() : outputs.status()).ok());
}

void CompileErrors() {
  const auto fails = [](const std::string& text, const std::string& message) {
    const Result<PJRT_LoadedExecutable*> executable = Compile(text);
    CHECK(!executable.ok());
    CheckError(executable.status(), executable.status().code(), message);
  };
  InThreads(3, [&](int) {
    fails("reject\n", "the host rejects");
    fails(ProgramName("host rejects"), "the host rejects");
    fails(ProgramName("unknown target"), "target nobody; registered are: ");
    fails(ProgramName("refused"), "not partitioned");
    fails(ProgramName("no answer"), "gave no answer");
    for (const auto& [name, reply] : replies) {
      if (name.find("cut at") != std::string::npos) fails(name, "the plan of a program");
    }
  });
}

// Programs end while executions of theirs are pending; results are dropped unseen.
void Untidy() {
  InThreads(kThreads, [](int thread) {
    for (int i = 0; i < kRepeats; ++i) {
      const char* const names[] = {"chain", "loop", "async", "host fails last"};
      const std::string name = names[(thread + i) % 4];
      const Executable executable(ProgramName(name));
      const Array x(1.0f), w(2.0f);
      std::vector<const Array*> inputs = {&x};
      if (name == "chain") inputs.push_back(&w);
      const Status status = Execute(executable.handle, inputs, name == "chain" ? 4 : 1).status();
      CHECK(status.ok() || name == "host fails last");
    }
  });
}

std::atomic<int> num_callbacks{0};

void Callbacks() {
  constexpr int kCalls = 20;
  num_callbacks = 0;
  const Executable good(ProgramName("async"));
  const Executable bad(ProgramName("call fails"));
  for (int i = 0; i < kCalls; ++i) {
    const Array x(1.0f);
    Result<std::vector<Array>> outputs = Execute((i % 2 == 0 ? good : bad).handle, {&x}, 1);
    if (!outputs.ok()) {  // a host without promises
      CHECK(i % 2 == 1);
      ++num_callbacks;
      continue;
    }
    PJRT_Event_OnReady_Args args = {};
    args.event = (*outputs)[0].ReadyEvent();
    args.user_arg = reinterpret_cast<void*>(static_cast<intptr_t>(i % 2));
    args.callback = [](PJRT_Error* error, void* should_fail) {
      CHECK((error != nullptr) == (should_fail != nullptr));
      if (error != nullptr) {
        PJRT_Error_Destroy_Args destroy = {};
        destroy.error = error;
        CheckOk(Ask(destroy));
      }
      ++num_callbacks;
    };
    CheckOk(Ask(args));
    PJRT_Event_Destroy_Args destroy = {};
    destroy.event = args.event;
    CheckOk(Ask(destroy));
  }
  while (num_callbacks < kCalls) std::this_thread::yield();
}

void Metadata() {
  const Executable chain(ProgramName("chain"));
  InThreads(kThreads, [&](int thread) {
    PJRT_LoadedExecutable_GetExecutable_Args get = {};
    get.loaded_executable = chain.handle;
    CheckOk(Ask(get));
    const auto ask = [&](auto args) {
      args.executable = get.executable;
      CheckOk(Ask(args));
      return args;
    };
    CHECK(ask(PJRT_Executable_NumOutputs_Args{}).num_outputs == 4);
    CHECK(ask(PJRT_Executable_SizeOfGeneratedCodeInBytes_Args{}).size_in_bytes == 300);
    CHECK(ask(PJRT_Executable_GetCompiledMemoryStats_Args{}).temp_size_in_bytes == 10);
    CHECK(ask(PJRT_Executable_GetCostAnalysis_Args{}).properties[0].float_value == 10);
    CHECK(ask(PJRT_Executable_Fingerprint_Args{}).executable_fingerprint_size > 5);
    PJRT_Program code = {};
    PJRT_Executable_OptimizedProgram_Args program = {};
    program.program = &code;
    program.executable = get.executable;
    CheckOk(Ask(program));
    std::string text(code.code_size, ' ');
    code.code = text.data();
    CheckOk(Ask(program));
    CHECK(text == ProgramName("chain"));

    PJRT_Executable_Serialize_Args serialize = {};
    serialize.executable = get.executable;
    CheckOk(Ask(serialize));
    const std::string bytes(serialize.serialized_bytes, serialize.serialized_bytes_size);
    serialize.serialized_executable_deleter(serialize.serialized_executable);
    PJRT_Executable_DeserializeAndLoad_Args load = {};
    load.client = client;
    load.serialized_executable = bytes.data();
    load.serialized_executable_size = bytes.size();
    CheckOk(Ask(load));
    RunChain(load.loaded_executable, thread);
    Destroy(load.loaded_executable);
    load.serialized_executable_size = bytes.size() - 1;
    CheckError(Ask(load), Code::kInvalidArgument, "cut short");

    if (api->version.minor == kKnownMinor) {
      PJRT_Client_Load_Args again = {};
      again.client = client;
      again.executable = get.executable;
      CheckOk(Ask(again));
      RunChain(again.loaded_executable, thread);  // not the shadow's zeros
      Destroy(again.loaded_executable);
    }

    PJRT_Executable_Destroy_Args destroy = {};
    destroy.executable = get.executable;
    CheckOk(Ask(destroy));
  });
}

// A plan that is given an array for good while an earlier one has yet to read it.
void DonatedWhileNeeded() {
  const Executable slow(ProgramName("read late"));
  const Executable loop(ProgramName("loop"));
  InThreads(kThreads, [&](int) {
    for (int i = 0; i < kRepeats; ++i) {
      const Array x(40.0f);
      Result<std::vector<Array>> first = Execute(slow.handle, {&x}, 1);
      CheckOk(first.status());
      Result<std::vector<Array>> second = Execute(loop.handle, {&x}, 1);
      CheckOk(second.status());
      CHECK(x.IsDeleted());
      (*second)[0].CheckValue(2 * (2 * (40.0f + 1) + 1));
      (*first)[0].CheckValue(40 + (40 + 1));
    }
  });
}

void OnTheHostOnly() {
  // The last word is how the plugin knows that a program reuses arguments.
  const Executable unplanned(Arrays(2) + "add 0 1\nout 2\ndonate 0 tf.aliasing_output\n");
  const Executable rewritten(ProgramName("rewritten"));
  const Executable async(ProgramName("async"));
  InThreads(kThreads, [&](int) {
    const Array x(1.0f), y(2.0f);
    // Still needed by a plan while the host wants its memory.
    Result<std::vector<Array>> slow = Execute(async.handle, {&x}, 1);
    Result<std::vector<Array>> sum = Execute(unplanned.handle, {&x, &y}, 1);
    CheckOk(sum.status());
    (*sum)[0].CheckValue(3);
    (*slow)[0].CheckValue(6);
    Result<std::vector<Array>> twice = Execute(rewritten.handle, {&y}, 1);
    CheckOk(twice.status());
    (*twice)[0].CheckValue(4);
  });
}

// Functions of the fake Metal, which only one of the programs has.
template <class Function>
Function* Fake(const char* name) {
  auto* function = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  CHECK(function != nullptr);
  return function;
}
bool is_metal = false;
std::atomic<int64_t> num_native_calls{0};

// What Scale does, to objects.
void* NativeScale(void* frame_pointer) {
  auto& frame = *static_cast<XLA_FFI_CallFrame*>(frame_pointer);
  bool is_native = false;
  bool is_question = false;
  for (XLA_FFI_Extension* extension = frame.extensions; extension != nullptr;
       extension = extension->next) {
    if (extension->type == kXlaFfiExtensionMetadata) {
      XLA_FFI_Version& version =
          reinterpret_cast<XLA_FFI_MetadataExtension*>(extension)->metadata->api_version;
      version.major = kXlaFfiApiMajor;
      version.minor = kXlaFfiApiMinor;
      is_question = true;
    }
    if (extension->type == kJfmExtensionCapabilities) {
      reinterpret_cast<JfmCapabilitiesExtension*>(extension)->takes_native_buffers = 1;
    }
    is_native |= extension->type == kJfmExtensionNativeBuffers;
  }
  if (is_question) return nullptr;
  const auto data = [&](const XLA_FFI_Values& values) {
    void* const pointer = static_cast<XLA_FFI_Buffer*>(values.values[0])->data;
    const auto bytes = Fake<decltype(fake_metal_buffer_bytes)>("fake_metal_buffer_bytes");
    return static_cast<float*>(is_native ? bytes(pointer) : pointer);
  };
  num_native_calls += is_native;
  const auto& factor = *static_cast<XLA_FFI_Scalar*>(frame.attributes.values[0]);
  const float* in = data(frame.arguments);
  float* out = data(frame.results);
  for (int64_t i = 0; i < kSize; ++i) out[i] = in[i] * *static_cast<float*>(factor.value);
  return nullptr;
}

void Start(const char* host, const char* host_buffers) {
  char error[1024];
  CHECK(jfm_pjrt_configure("/nowhere/host.so", "tiny_metal", host_buffers, 0, Partition, error,
                           sizeof(error)) != 0);
  CHECK(std::strstr(error, "/nowhere/host.so") != nullptr);
  CHECK(jfm_pjrt_host_facts(error, sizeof(error)) != 0);
  for (int i = 0; i < 2; ++i) {
    const int code =
        jfm_pjrt_configure(host, "tiny_metal", host_buffers, 0, Partition, error, sizeof(error));
    if (code != 0) std::fprintf(stderr, "%s\n", error);
    CHECK(code == 0);
  }
  CHECK(jfm_pjrt_configure(host, "other", host_buffers, 0, Partition, error, sizeof(error)) != 0);
  CHECK(jfm_pjrt_host_facts(error, sizeof(error)) == 0);
  const auto add = [&](const char* name, void* (*function)(void*)) {
    CHECK(jfm_pjrt_register_handler(name, std::strlen(name), nullptr, nullptr, nullptr,
                                    reinterpret_cast<void*>(function), 1, 0, error,
                                    sizeof(error)) == 0);
  };
  add("Scale", is_metal ? &NativeScale : &Scale);
  add("Fail", &Fail);
  add("Throw", &Throw);
  add("Async", &Async);
  add("Pool", &Pool);
  api = GetPjrtApi();
}

int64_t LiveObjects() {
  if (!is_metal) return 0;
  return Fake<decltype(fake_metal_live_objects)>("fake_metal_live_objects")();
}

void WithAClient(const std::function<void()>& test) {
  PJRT_Client_Create_Args create = {};
  CheckOk(Ask(create));
  client = create.client;
  PJRT_Client_AddressableDevices_Args devices = {};
  devices.client = client;
  CheckOk(Ask(devices));
  device = devices.addressable_devices[0];
  const int64_t live_objects = LiveObjects();  // our device's own
  test();
  PJRT_Client_Destroy_Args destroy = {};
  destroy.client = client;
  CheckOk(Ask(destroy));
  CHECK(Statistic("live_buffers") == 0);
  CHECK(LiveObjects() == live_objects);
}

}  // namespace
}  // namespace jfm::pjrt

int main(int argc, char** argv) {
  using namespace jfm::pjrt;
  CHECK(argc == 3 || argc == 4);
  is_metal = argc == 4 && std::strcmp(argv[3], "metal") == 0;
  if (argc == 4) setenv(is_metal ? "TINY_HOST_METAL" : "TINY_HOST_OLD", "1", 1);
  AddPlans();
  Start(argv[1], argv[2]);
  const std::pair<const char*, void (*)()> tests[] = {
      {"straight", Straight},
      {"chained", Chained},
      {"loops", Loops},
      {"branching", Branching},
      {"compile errors", CompileErrors},
      {"execution errors", ExecutionErrors},
      {"untidy", Untidy},
      {"callbacks", Callbacks},
      {"metadata", Metadata},
      {"on the host only", OnTheHostOnly},
      {"donated while needed", DonatedWhileNeeded},
  };
  for (const auto& [name, test] : tests) {
    std::fprintf(stderr, "%s\n", name);  // seen if it fails
    WithAClient(test);
  }
  CHECK(Statistic("calls") > 100);
  CHECK((num_native_calls > 100) == is_metal);
  std::puts("pjrt: good");
  return 0;
}
