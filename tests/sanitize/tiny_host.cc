// A PJRT plugin that is all instrumented: the host of the driver pjrt.cc. It computes a
// handful of things on small arrays and fails when it is told to. Like XLA's CPU plugin, it
// hands out results before they are there, and runs programs in the order in which it gets
// them: one that waited for an alias buffer would hold up all others, so it takes none.
// With TINY_HOST_OLD in the environment its table is that of jax-metal: version 0.47, and
// nothing that came later.
//
// Programs are text, a line per value, numbered from 0:
//   in TYPE N           an argument, in order; TYPE f32, s32 or pred; N -1 is a scalar
//   const TYPE N VALUE
//   add A B | mul A B | less A VALUE | index A     the last two give a scalar
//   fail                the execution fails later, refuse: at once, reject: compilation
//   donate I            the first result takes argument I's memory
//   out A               a result
#include <dlfcn.h>

#include <algorithm>
#include <condition_variable>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plugin/pjrt/pjrt_api.h"
#include "tests/plugin/device/fake_metal/fake_metal.h"
#include "plugin/status.h"

using jfm::Code;
using jfm::Status;

// -- Objects ------------------------------------------------------------------------

namespace {

class Completion {
 public:
  void Set(Status status) {
    std::vector<std::function<void(const Status&)>> waiters;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      status_ = std::move(status);
      done_ = true;
      waiters.swap(waiters_);
      changed_.notify_all();
    }
    for (const auto& waiter : waiters) waiter(status_);
  }
  Status Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
    return status_;
  }
  bool is_done() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }
  void Then(std::function<void(const Status&)> waiter) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!done_) {
        waiters_.push_back(std::move(waiter));
        return;
      }
    }
    waiter(status_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  Status status_;  // not changed once done
  std::vector<std::function<void(const Status&)>> waiters_;
};
using CompletionRef = std::shared_ptr<Completion>;

CompletionRef Done() {
  auto completion = std::make_shared<Completion>();
  completion->Set({});
  return completion;
}

struct Type {
  int32_t buffer_type = 0;
  std::vector<int64_t> dims;

  size_t element_bytes() const { return buffer_type == jfm::pjrt::PJRT_BufferType_PRED ? 1 : 4; }
  size_t count() const { return dims.empty() ? 1 : static_cast<size_t>(dims[0]); }
  size_t bytes() const { return count() * element_bytes(); }
};

// With TINY_HOST_METAL the host's memory is objects of the fake Metal in the program.
bool IsMetal() { return std::getenv("TINY_HOST_METAL") != nullptr; }
template <class Function>
Function* InProgram(const char* name) {
  auto* function = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  if (function == nullptr) std::abort();
  return function;
}

// Exactly as large as it must be, so that AddressSanitizer sees every step beyond.
struct Memory {
  explicit Memory(size_t size_bytes) : size(size_bytes) {
    if (IsMetal() && size > 0) {
      object = InProgram<decltype(fake_metal_new_buffer)>("fake_metal_new_buffer")(size, 1);
      data = Bytes(object);
    } else if (posix_memalign(&data, 64, size > 0 ? size : 1) != 0) {
      std::abort();
    }
  }
  // A view of an object of somebody else.
  Memory(void* view, size_t size_bytes, std::function<void()> when_deleted)
      : size(size_bytes), object(view), data(Bytes(view)), on_delete(std::move(when_deleted)) {}
  ~Memory() {
    if (on_delete != nullptr) {
      // Still there, as the host may have been reading it.
      if (data != Bytes(object)) std::abort();
      on_delete();
    } else if (object != nullptr) {
      InProgram<decltype(fake_metal_release)>("fake_metal_release")(object);
    } else {
      std::free(data);
    }
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  static void* Bytes(void* object) {
    return InProgram<decltype(fake_metal_buffer_bytes)>("fake_metal_buffer_bytes")(object);
  }

  size_t size;
  void* object = nullptr;
  void* data = nullptr;
  std::function<void()> on_delete;
};
using MemoryRef = std::shared_ptr<Memory>;

struct Content {
  std::mutex mutex;  // protects what an alias buffer gets later
  MemoryRef memory;
  bool is_promise = false;  // an alias buffer that is not fulfilled yet
  CompletionRef ready = std::make_shared<Completion>();

  MemoryRef Get() {
    std::lock_guard<std::mutex> lock(mutex);
    return memory;
  }
};
using ContentRef = std::shared_ptr<Content>;

enum class Op { kIn, kConst, kAdd, kMul, kLess, kIndex };

struct Line {
  Op op = Op::kIn;
  Type type;
  int64_t a = 0, b = 0;
  float value = 0;
};

struct Program {
  std::vector<Line> lines;
  std::vector<int64_t> outputs;
  std::vector<Type> inputs;
  int64_t donated = -1;
  bool fails = false, refuses = false;
  std::vector<int32_t> output_types;
  std::vector<int64_t> output_dims;
  std::vector<size_t> output_ranks;
};
using ProgramRef = std::shared_ptr<const Program>;

}  // namespace

namespace jfm::pjrt {

struct PJRT_Event {
  CompletionRef completion;
};
struct PJRT_Buffer {
  Type type;
  std::atomic<int> num_references{0};  // external ones
  std::mutex mutex;                    // protects content: null once deleted
  ContentRef content = std::make_shared<Content>();

  ContentRef Get() {
    std::lock_guard<std::mutex> lock(mutex);
    return content;
  }
  void Delete() {
    std::lock_guard<std::mutex> lock(mutex);
    content = nullptr;
  }
};
struct PJRT_LoadedExecutable {
  ProgramRef program;
};
struct PJRT_Executable {
  ProgramRef program;
};
struct PJRT_FulfillAliasBufferCallback {
  ContentRef content;
};
struct PJRT_Device {};
struct PJRT_ExecuteContext {};
struct PJRT_Client {
  std::mutex mutex;  // protects the rest
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  bool is_ending = false;
  std::thread worker{[this] { Work(); }};

  void Work() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return is_ending || !work.empty(); });
      if (work.empty()) return;
      {
        const std::function<void()> next = std::move(work.front());
        work.pop_front();
        lock.unlock();
        next();
      }
      lock.lock();
    }
  }
};

}  // namespace jfm::pjrt

namespace jfm::pjrt {
namespace {

PJRT_Device device;
PJRT_Device* const devices[] = {&device};
PJRT_MemoryFunctions memory_functions = {sizeof(PJRT_MemoryFunctions), nullptr, sizeof(PJRT_Memory),
                                         nullptr, nullptr};
PJRT_Memory memory_space = {&memory_functions};

struct HostError : PJRT_Error {
  Status status;
};
const PJRT_ErrorFunctions error_functions = {};

PJRT_Error* NewError(Status status) {
  if (status.ok()) return nullptr;
  auto* error = new HostError;
  error->functions = &error_functions;
  error->status = std::move(status);
  return error;
}

Status Deleted() { return jfm::InvalidArgument("the host's buffer is deleted"); }

// -- Compilation --------------------------------------------------------------------

class Words {
 public:
  explicit Words(const std::string& line) : line_(line) {}
  std::string Next() {
    while (at_ < line_.size() && line_[at_] == ' ') ++at_;
    const size_t start = at_;
    while (at_ < line_.size() && line_[at_] != ' ') ++at_;
    return line_.substr(start, at_ - start);
  }
  int64_t Int() { return std::atoll(Next().c_str()); }
  Type ReadType() {
    const std::string name = Next();
    Type type;
    type.buffer_type = name == "f32"   ? PJRT_BufferType_F32
                       : name == "s32" ? PJRT_BufferType_S32
                                       : PJRT_BufferType_PRED;
    const int64_t count = Int();
    if (count >= 0) type.dims.push_back(count);
    return type;
  }

 private:
  const std::string& line_;
  size_t at_ = 0;
};

Status ParseLine(const std::string& text, Program& program) {
  Words words(text);
  const std::string word = words.Next();
  Line line;
  if (word == "in" || word == "const") {
    line.op = word == "in" ? Op::kIn : Op::kConst;
    line.type = words.ReadType();
    line.a = static_cast<int64_t>(program.inputs.size());
    line.value = std::strtof(words.Next().c_str(), nullptr);
    if (word == "in") program.inputs.push_back(line.type);
  } else if (word == "add" || word == "mul") {
    line.op = word == "add" ? Op::kAdd : Op::kMul;
    line.a = words.Int();
    line.b = words.Int();
    line.type = program.lines.at(static_cast<size_t>(line.a)).type;
  } else if (word == "less" || word == "index") {
    line.op = word == "less" ? Op::kLess : Op::kIndex;
    line.a = words.Int();
    line.value = std::strtof(words.Next().c_str(), nullptr);
    line.type = {word == "less" ? PJRT_BufferType_PRED : PJRT_BufferType_S32, {}};
  } else {
    if (word == "out") program.outputs.push_back(words.Int());
    if (word == "donate") program.donated = words.Int();
    if (word == "fail") program.fails = true;
    if (word == "refuse") program.refuses = true;
    if (word == "reject") return jfm::InvalidArgument("the host rejects this program");
    return {};
  }
  program.lines.push_back(line);
  return {};
}

Status Parse(const std::string& code, Program& program) {
  for (size_t start = 0; start < code.size();) {
    size_t end = code.find('\n', start);
    if (end == std::string::npos) end = code.size();
    const Status status = ParseLine(code.substr(start, end - start), program);
    if (!status.ok()) return status;
    start = end + 1;
  }
  for (int64_t output : program.outputs) {
    const Type& type = program.lines.at(static_cast<size_t>(output)).type;
    program.output_types.push_back(type.buffer_type);
    program.output_ranks.push_back(type.dims.size());
    program.output_dims.insert(program.output_dims.end(), type.dims.begin(), type.dims.end());
  }
  return {};
}

// -- Execution ----------------------------------------------------------------------

MemoryRef Compute(const Line& line, const std::vector<MemoryRef>& values, MemoryRef place) {
  const MemoryRef out = place != nullptr ? place : std::make_shared<Memory>(line.type.bytes());
  const size_t count = line.type.count();
  const auto* a = static_cast<const float*>(values[static_cast<size_t>(line.a)]->data);
  auto* result = static_cast<float*>(out->data);
  switch (line.op) {
    case Op::kIn:
    case Op::kConst:
      break;
    case Op::kAdd:
    case Op::kMul: {
      const auto* b = static_cast<const float*>(values[static_cast<size_t>(line.b)]->data);
      for (size_t i = 0; i < count; ++i) {
        result[i] = line.op == Op::kAdd ? a[i] + b[i] : a[i] * b[i];
      }
      break;
    }
    case Op::kLess:
      *static_cast<uint8_t*>(out->data) = a[0] < line.value;
      break;
    case Op::kIndex:
      *static_cast<int32_t*>(out->data) = static_cast<int32_t>(a[0]);
      break;
  }
  return out;
}

MemoryRef Fill(const Line& line) {
  auto memory = std::make_shared<Memory>(line.type.bytes());
  for (size_t i = 0; i < line.type.count(); ++i) {
    if (line.type.buffer_type == PJRT_BufferType_F32) {
      static_cast<float*>(memory->data)[i] = line.value;
    } else if (line.type.buffer_type == PJRT_BufferType_S32) {
      static_cast<int32_t*>(memory->data)[i] = static_cast<int32_t>(line.value);
    } else {
      static_cast<uint8_t*>(memory->data)[i] = line.value != 0;
    }
  }
  return memory;
}

Status RunProgram(const Program& program, const std::vector<ContentRef>& inputs, bool donates,
                  const std::vector<ContentRef>& outputs) {
  for (const ContentRef& input : inputs) {
    if (Status status = input->ready->Wait(); !status.ok()) return status;
  }
  if (program.fails) return {Code::kAborted, "the host's execution failed"};
  std::vector<MemoryRef> values;
  const int64_t first_output = program.outputs.empty() ? -1 : program.outputs[0];
  for (const Line& line : program.lines) {
    const bool is_first = static_cast<int64_t>(values.size()) == first_output;
    if (line.op == Op::kIn) {
      values.push_back(inputs.at(static_cast<size_t>(line.a))->Get());
    } else if (line.op == Op::kConst) {
      values.push_back(Fill(line));
    } else {
      const MemoryRef place =
          donates && is_first ? inputs.at(static_cast<size_t>(program.donated))->Get() : nullptr;
      values.push_back(Compute(line, values, place));
    }
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto index = static_cast<size_t>(program.outputs[i]);
    MemoryRef memory = values[index];
    if (program.lines[index].op == Op::kIn || (i > 0 && program.outputs[i] == first_output)) {
      auto copy = std::make_shared<Memory>(memory->size);
      std::memcpy(copy->data, memory->data, memory->size);
      memory = std::move(copy);
    }
    std::lock_guard<std::mutex> lock(outputs[i]->mutex);
    outputs[i]->memory = std::move(memory);
  }
  return {};
}

PJRT_Client* the_client = nullptr;  // one at a time

Status Execute(PJRT_LoadedExecutable_Execute_Args& args) {
  const ProgramRef program = args.executable->program;
  if (program->refuses) return {Code::kUnavailable, "the host refuses to execute this"};
  if (args.num_args != program->inputs.size()) return jfm::Internal("number of arguments");
  bool donates = program->donated >= 0;
  for (size_t i = 0; i < args.options->num_non_donatable_input_indices; ++i) {
    if (args.options->non_donatable_input_indices[i] == program->donated) donates = false;
  }
  std::vector<ContentRef> inputs;
  for (size_t i = 0; i < args.num_args; ++i) {
    inputs.push_back(args.argument_lists[0][i]->Get());
    if (inputs.back() == nullptr) return Deleted();
    std::lock_guard<std::mutex> lock(inputs.back()->mutex);
    if (inputs.back()->is_promise) return jfm::Internal("the host would wait for a promise");
  }
  if (donates) args.argument_lists[0][program->donated]->Delete();
  std::vector<ContentRef> outputs;
  size_t dim = 0;
  for (size_t i = 0; i < program->outputs.size(); ++i) {
    auto* buffer = new PJRT_Buffer;
    buffer->type.buffer_type = program->output_types[i];
    for (size_t k = 0; k < program->output_ranks[i]; ++k) {
      buffer->type.dims.push_back(program->output_dims[dim++]);
    }
    outputs.push_back(buffer->content);
    args.output_lists[0][i] = buffer;
  }
  auto done = std::make_shared<Completion>();
  if (args.device_complete_events != nullptr) {
    args.device_complete_events[0] = new PJRT_Event{done};
  }
  std::lock_guard<std::mutex> lock(the_client->mutex);
  the_client->work.push_back([=] {
    const Status status = RunProgram(*program, inputs, donates, outputs);
    for (const ContentRef& output : outputs) output->ready->Set(status);
    done->Set(status);
  });
  the_client->changed.notify_one();
  return {};
}

// -- The other functions --------------------------------------------------------------

Status ErrorMessage(PJRT_Error_Message_Args& args) {
  const std::string& text = static_cast<const HostError*>(args.error)->status.message();
  args.message = text.data();
  args.message_size = text.size();
  return {};
}
Status ErrorGetCode(PJRT_Error_GetCode_Args& args) {
  args.code = static_cast<int32_t>(static_cast<const HostError*>(args.error)->status.code());
  return {};
}
Status ErrorDestroy(PJRT_Error_Destroy_Args& args) {
  delete static_cast<HostError*>(args.error);
  return {};
}
Status Initialize(PJRT_Plugin_Initialize_Args&) { return {}; }
Status Attributes(PJRT_Plugin_Attributes_Args& args) {
  args.num_attributes = 0;
  return {};
}

Status EventDestroy(PJRT_Event_Destroy_Args& args) {
  delete args.event;
  return {};
}
Status EventIsReady(PJRT_Event_IsReady_Args& args) {
  args.is_ready = args.event->completion->is_done();
  return {};
}
Status EventError(PJRT_Event_Error_Args& args) { return args.event->completion->Wait(); }
Status EventAwait(PJRT_Event_Await_Args& args) { return args.event->completion->Wait(); }
Status EventOnReady(PJRT_Event_OnReady_Args& args) {
  args.event->completion->Then([callback = args.callback, user = args.user_arg](
                                   const Status& status) { callback(NewError(status), user); });
  return {};
}
Status EventCreate(PJRT_Event_Create_Args& args) {
  args.event = new PJRT_Event{std::make_shared<Completion>()};
  return {};
}
Status EventSet(PJRT_Event_Set_Args& args) {
  args.event->completion->Set(
      {static_cast<Code>(args.error_code), {args.error_message, args.error_message_size}});
  return {};
}

Status ClientCreate(PJRT_Client_Create_Args& args) {
  args.client = the_client = new PJRT_Client;
  return {};
}
Status ClientDestroy(PJRT_Client_Destroy_Args& args) {
  {
    std::lock_guard<std::mutex> lock(args.client->mutex);
    args.client->is_ending = true;
    args.client->changed.notify_one();
  }
  args.client->worker.join();
  delete args.client;
  return {};
}
Status PlatformName(PJRT_Client_PlatformName_Args& args) {
  // Known hosts, whose pointers are objects or addresses.
  args.platform_name = IsMetal() ? "METAL" : "cpu";
  args.platform_name_size = std::strlen(args.platform_name);
  return {};
}
Status PlatformVersion(PJRT_Client_PlatformVersion_Args& args) {
  args.platform_version = IsMetal() ? "metal_0.5.1" : "tiny";
  args.platform_version_size = std::strlen(args.platform_version);
  return {};
}
Status AddressableDevices(PJRT_Client_AddressableDevices_Args& args) {
  args.addressable_devices = devices;
  args.num_addressable_devices = 1;
  return {};
}
Status DefaultMemory(PJRT_Device_DefaultMemory_Args& args) {
  args.memory = &memory_space;
  return {};
}
Status MemoryKind(PJRT_Memory_Kind_Args& args) {
  args.kind = "tiny";
  args.kind_size = 4;
  return {};
}

Status Compile(PJRT_Client_Compile_Args& args) {
  auto program = std::make_shared<Program>();
  const Status status = Parse({args.program->code, args.program->code_size}, *program);
  if (!status.ok()) return status;
  args.executable = new PJRT_LoadedExecutable{program};
  return {};
}
Status LoadedDestroy(PJRT_LoadedExecutable_Destroy_Args& args) {
  delete args.executable;
  return {};
}
Status LoadedIsDeleted(PJRT_LoadedExecutable_IsDeleted_Args& args) {
  args.is_deleted = false;
  return {};
}
Status GetExecutable(PJRT_LoadedExecutable_GetExecutable_Args& args) {
  args.executable = new PJRT_Executable{args.loaded_executable->program};
  return {};
}
Status Load(PJRT_Client_Load_Args& args) {
  args.loaded_executable = new PJRT_LoadedExecutable{args.executable->program};
  return {};
}
Status ExecutableDestroy(PJRT_Executable_Destroy_Args& args) {
  delete args.executable;
  return {};
}
Status NumOutputs(PJRT_Executable_NumOutputs_Args& args) {
  args.num_outputs = args.executable->program->outputs.size();
  return {};
}
Status OutputTypes(PJRT_Executable_OutputElementTypes_Args& args) {
  args.output_types = args.executable->program->output_types.data();
  args.num_output_types = args.executable->program->output_types.size();
  return {};
}
Status OutputDimensions(PJRT_Executable_OutputDimensions_Args& args) {
  const Program& program = *args.executable->program;
  args.num_outputs = program.outputs.size();
  args.dims = program.output_dims.data();
  args.dim_sizes = program.output_ranks.data();
  return {};
}
Status CodeSize(PJRT_Executable_SizeOfGeneratedCodeInBytes_Args& args) {
  args.size_in_bytes = 100;
  return {};
}
Status MemoryStats(PJRT_Executable_GetCompiledMemoryStats_Args& args) {
  args.temp_size_in_bytes = 10;
  return {};
}
Status CostAnalysis(PJRT_Executable_GetCostAnalysis_Args& args) {
  static PJRT_NamedValue flops = {};
  flops.struct_size = sizeof(flops);
  flops.name = "flops";
  flops.name_size = 5;
  flops.type = PJRT_NamedValueType_Float;
  flops.float_value = 5;
  flops.value_size = 1;
  args.properties = &flops;
  args.num_properties = 1;
  return {};
}

Status FromHost(PJRT_Client_BufferFromHostBuffer_Args& args) {
  auto* buffer = new PJRT_Buffer;
  buffer->type = {args.type, {args.dims, args.dims + args.num_dims}};
  buffer->content->memory = std::make_shared<Memory>(buffer->type.bytes());
  std::memcpy(buffer->content->memory->data, args.data, buffer->type.bytes());
  buffer->content->ready->Set({});
  args.buffer = buffer;
  args.done_with_host_buffer = new PJRT_Event{Done()};
  return {};
}
Status Uninitialized(PJRT_Client_CreateUninitializedBuffer_Args& args) {
  auto* buffer = new PJRT_Buffer;
  buffer->type = {args.shape_element_type,
                  {args.shape_dims, args.shape_dims + args.shape_num_dims}};
  buffer->content->memory = std::make_shared<Memory>(buffer->type.bytes());
  buffer->content->ready->Set({});
  args.buffer = buffer;
  return {};
}
Status CreateAlias(PJRT_Client_CreateAliasBuffer_Args& args) {
  auto* buffer = new PJRT_Buffer;
  buffer->type = {args.shape_element_type,
                  {args.shape_dims, args.shape_dims + args.shape_num_dims}};
  buffer->content->is_promise = true;
  args.alias_buffer = buffer;
  args.fulfill_alias_buffer_cb = new PJRT_FulfillAliasBufferCallback{buffer->content};
  return {};
}
Status FulfillAlias(PJRT_Client_FulfillAliasBuffer_Args& args) {
  const std::unique_ptr<PJRT_FulfillAliasBufferCallback> alias(args.fulfill_alias_buffer_cb);
  if (args.status_code != 0) {
    Status status = {static_cast<Code>(args.status_code),
                     {args.error_message, args.error_message_size}};
    {
      std::lock_guard<std::mutex> lock(alias->content->mutex);
      alias->content->is_promise = false;
    }
    alias->content->ready->Set(status);
    return status;  // as XLA does
  }
  const ContentRef source = args.buffer->Get();
  if (source == nullptr) return Deleted();
  {
    std::lock_guard<std::mutex> lock(alias->content->mutex);
    alias->content->is_promise = false;
  }
  source->ready->Then([source, target = alias->content](const Status& status) {
    {
      std::lock_guard<std::mutex> lock(target->mutex);
      target->memory = source->Get();
    }
    target->ready->Set(status);
  });
  return {};
}
Status BufferDestroy(PJRT_Buffer_Destroy_Args& args) {
  if (args.buffer->num_references != 0) std::abort();
  delete args.buffer;
  return {};
}
Status BufferDelete(PJRT_Buffer_Delete_Args& args) {
  args.buffer->Delete();
  return {};
}
Status BufferIsDeleted(PJRT_Buffer_IsDeleted_Args& args) {
  args.is_deleted = args.buffer->Get() == nullptr;
  return {};
}
Status Dimensions(PJRT_Buffer_Dimensions_Args& args) {
  args.dims = args.buffer->type.dims.data();
  args.num_dims = args.buffer->type.dims.size();
  return {};
}
Status ReadyEvent(PJRT_Buffer_ReadyEvent_Args& args) {
  const ContentRef content = args.buffer->Get();
  if (content == nullptr) return Deleted();
  args.event = new PJRT_Event{content->ready};
  return {};
}
Status Pointer(PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args& args) {
  const ContentRef content = args.buffer->Get();
  if (content == nullptr) return Deleted();
  if (!content->ready->is_done()) std::abort();  // as XLA does
  const MemoryRef memory = content->Get();
  if (IsMetal() && args.buffer->num_references == 0) std::abort();
  args.device_memory_ptr = IsMetal() ? memory->object : memory->data;
  return {};
}
Status IncreaseReferences(PJRT_Buffer_IncreaseExternalReferenceCount_Args& args) {
  ++args.buffer->num_references;
  return {};
}
Status DecreaseReferences(PJRT_Buffer_DecreaseExternalReferenceCount_Args& args) {
  if (--args.buffer->num_references < 0) std::abort();
  return {};
}
Status CreateView(PJRT_Client_CreateViewOfDeviceBuffer_Args& args) {
  auto* buffer = new PJRT_Buffer;
  buffer->type = {args.element_type, {args.dims, args.dims + args.num_dims}};
  buffer->content->memory = std::make_shared<Memory>(
      args.device_buffer_ptr, buffer->type.bytes(),
      [callback = args.on_delete_callback, object = args.device_buffer_ptr,
       user = args.on_delete_callback_arg] { callback(object, user); });
  buffer->content->ready->Set({});
  args.buffer = buffer;
  return {};
}
Status ToHost(PJRT_Buffer_ToHostBuffer_Args& args) {
  const ContentRef content = args.src->Get();
  if (content == nullptr) return Deleted();
  auto done = std::make_shared<Completion>();
  const size_t size = args.src->type.bytes();
  if (args.dst == nullptr) {
    args.dst_size = size;
    return {};
  }
  if (args.dst_size < size) return jfm::InvalidArgument("too small");
  args.event = new PJRT_Event{done};
  content->ready->Then([=, target = args.dst](const Status& status) {
    if (status.ok()) std::memcpy(target, content->Get()->data, size);
    done->Set(status);
  });
  return {};
}
Status CopyToMemory(PJRT_Buffer_CopyToMemory_Args& args) {
  const ContentRef content = args.buffer->Get();
  if (content == nullptr) return Deleted();
  auto* copy = new PJRT_Buffer;
  copy->type = args.buffer->type;
  content->ready->Then([content, target = copy->content](const Status& status) {
    if (status.ok()) {
      const MemoryRef source = content->Get();
      auto memory = std::make_shared<Memory>(source->size);
      std::memcpy(memory->data, source->data, source->size);
      std::lock_guard<std::mutex> lock(target->mutex);
      target->memory = std::move(memory);
    }
    target->ready->Set(status);
  });
  args.dst_buffer = copy;
  return {};
}

template <class Args, Status (*function)(Args&)>
PJRT_Error* Entry(void* args) {
  return NewError(function(*static_cast<Args*>(args)));
}

PJRT_Error* Missing(void*) { return NewError(jfm::Unimplemented("not a tiny thing")); }

PJRT_Api MakeApi() {
  PJRT_Api api = {};
  api.struct_size = sizeof(api);
  api.version = {sizeof(api.version), nullptr, 0, kKnownMinor};
  for (PJRT_Function& slot : api.slots) slot = &Missing;
#define JFM_SLOT(function, Args) \
  api.slots[static_cast<size_t>(Args::kSlot)] = &Entry<Args, function>
  JFM_SLOT(ErrorMessage, PJRT_Error_Message_Args);
  JFM_SLOT(ErrorGetCode, PJRT_Error_GetCode_Args);
  JFM_SLOT(ErrorDestroy, PJRT_Error_Destroy_Args);
  JFM_SLOT(Initialize, PJRT_Plugin_Initialize_Args);
  JFM_SLOT(Attributes, PJRT_Plugin_Attributes_Args);
  JFM_SLOT(EventDestroy, PJRT_Event_Destroy_Args);
  JFM_SLOT(EventIsReady, PJRT_Event_IsReady_Args);
  JFM_SLOT(EventError, PJRT_Event_Error_Args);
  JFM_SLOT(EventAwait, PJRT_Event_Await_Args);
  JFM_SLOT(EventOnReady, PJRT_Event_OnReady_Args);
  JFM_SLOT(EventCreate, PJRT_Event_Create_Args);
  JFM_SLOT(EventSet, PJRT_Event_Set_Args);
  JFM_SLOT(ClientCreate, PJRT_Client_Create_Args);
  JFM_SLOT(ClientDestroy, PJRT_Client_Destroy_Args);
  JFM_SLOT(PlatformName, PJRT_Client_PlatformName_Args);
  JFM_SLOT(PlatformVersion, PJRT_Client_PlatformVersion_Args);
  JFM_SLOT(AddressableDevices, PJRT_Client_AddressableDevices_Args);
  JFM_SLOT(DefaultMemory, PJRT_Device_DefaultMemory_Args);
  JFM_SLOT(MemoryKind, PJRT_Memory_Kind_Args);
  JFM_SLOT(Compile, PJRT_Client_Compile_Args);
  JFM_SLOT(LoadedDestroy, PJRT_LoadedExecutable_Destroy_Args);
  JFM_SLOT(LoadedIsDeleted, PJRT_LoadedExecutable_IsDeleted_Args);
  JFM_SLOT(GetExecutable, PJRT_LoadedExecutable_GetExecutable_Args);
  JFM_SLOT(Load, PJRT_Client_Load_Args);
  JFM_SLOT(Execute, PJRT_LoadedExecutable_Execute_Args);
  JFM_SLOT(ExecutableDestroy, PJRT_Executable_Destroy_Args);
  JFM_SLOT(NumOutputs, PJRT_Executable_NumOutputs_Args);
  JFM_SLOT(OutputTypes, PJRT_Executable_OutputElementTypes_Args);
  JFM_SLOT(OutputDimensions, PJRT_Executable_OutputDimensions_Args);
  JFM_SLOT(CodeSize, PJRT_Executable_SizeOfGeneratedCodeInBytes_Args);
  JFM_SLOT(MemoryStats, PJRT_Executable_GetCompiledMemoryStats_Args);
  JFM_SLOT(CostAnalysis, PJRT_Executable_GetCostAnalysis_Args);
  JFM_SLOT(FromHost, PJRT_Client_BufferFromHostBuffer_Args);
  JFM_SLOT(Uninitialized, PJRT_Client_CreateUninitializedBuffer_Args);
  JFM_SLOT(CreateAlias, PJRT_Client_CreateAliasBuffer_Args);
  JFM_SLOT(FulfillAlias, PJRT_Client_FulfillAliasBuffer_Args);
  JFM_SLOT(BufferDestroy, PJRT_Buffer_Destroy_Args);
  JFM_SLOT(BufferDelete, PJRT_Buffer_Delete_Args);
  JFM_SLOT(BufferIsDeleted, PJRT_Buffer_IsDeleted_Args);
  JFM_SLOT(Dimensions, PJRT_Buffer_Dimensions_Args);
  JFM_SLOT(ReadyEvent, PJRT_Buffer_ReadyEvent_Args);
  JFM_SLOT(Pointer, PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args);
  JFM_SLOT(IncreaseReferences, PJRT_Buffer_IncreaseExternalReferenceCount_Args);
  JFM_SLOT(DecreaseReferences, PJRT_Buffer_DecreaseExternalReferenceCount_Args);
  JFM_SLOT(CreateView, PJRT_Client_CreateViewOfDeviceBuffer_Args);
  JFM_SLOT(ToHost, PJRT_Buffer_ToHostBuffer_Args);
  JFM_SLOT(CopyToMemory, PJRT_Buffer_CopyToMemory_Args);
#undef JFM_SLOT
  if (std::getenv("TINY_HOST_OLD") != nullptr) {
    api.version.minor = 47;
    api.struct_size = kApiHeaderSize + kNumStableSlots * sizeof(PJRT_Function);
    std::fill(api.slots + kNumStableSlots, api.slots + kNumSlots, nullptr);
    for (Slot slot : {Slot::kDevice_DefaultMemory, Slot::kBuffer_CopyToMemory}) {
      api.slots[static_cast<size_t>(slot)] = &Missing;
    }
  }
  return api;
}

}  // namespace
}  // namespace jfm::pjrt

extern "C" const jfm::pjrt::PJRT_Api* GetPjrtApi() {
  static const jfm::pjrt::PJRT_Api api = jfm::pjrt::MakeApi();
  return &api;
}
