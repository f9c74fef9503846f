// Driver: the custom-call runtime with every third-party handler, from many threads, error
// paths too.
#include <cstdint>
#include <cstring>
#include <vector>

#include "plugin/pjrt/custom_call/handler_registry.h"
#include "tests/sanitize/specs.h"

extern "C" {
#define JFM_HANDLERS(X) \
  X(Scale)              \
  X(Split)              \
  X(SumAll)             \
  X(TokenPass)          \
  X(Scalars)            \
  X(Complex)            \
  X(Arrays)             \
  X(Dictionaries)       \
  X(AllAttributes)      \
  X(Scratch)            \
  X(Pool)               \
  X(NestedPool)         \
  X(UserDataNumber)     \
  X(Stream)             \
  X(Fail)               \
  X(Throw)              \
  X(Async)              \
  X(Nothing)
#define JFM_DECLARE(name) void* name(void* frame);
JFM_HANDLERS(JFM_DECLARE)
JFM_DECLARE(Count)
JFM_DECLARE(CountInstantiate)
JFM_DECLARE(CountPrepare)
JFM_DECLARE(CountInitialize)
JFM_DECLARE(Raw01First)
JFM_DECLARE(Raw01Later)
JFM_DECLARE(Raw02)
JFM_DECLARE(Raw03)
JFM_DECLARE(Raw05)
JFM_DECLARE(RawFuture)
JFM_DECLARE(RawRefuses)
int64_t* CounterTypeId();
void DeleteCounter(void* counter);
int64_t* PayloadTypeId();
int64_t NumCounters();
}

namespace jfm::pjrt {
namespace {

constexpr int kThreads = 8;

void* Address(void* (*function)(void*)) { return reinterpret_cast<void*>(function); }

HandlerStages Execute(void* (*function)(void*)) {
  HandlerStages stages;
  stages.execute = Address(function);
  return stages;
}

void Register() {
  CheckOk(RegisterType("Counter", CounterTypeId(), &DeleteCounter));
  CheckOk(RegisterType("Payload", PayloadTypeId(), nullptr));
  // From all threads: the same functions again are fine.
  InThreads(kThreads, [](int) {
#define JFM_REGISTER(name) CheckOk(RegisterHandler(#name, Execute(&name)));
    JFM_HANDLERS(JFM_REGISTER)
    CheckOk(RegisterHandler("Count", {Address(&CountInstantiate), Address(&CountPrepare),
                                      Address(&CountInitialize), Address(&Count)}));
    CheckError(RegisterHandler("RawFuture", Execute(&RawFuture)), Code::kInvalidArgument, "0.6");
    CheckError(RegisterHandler("RawRefuses", Execute(&RawRefuses)), Code::kInternal, "not today");
    CHECK(RegisteredTargets().size() >= 18);
  });
}

// One call site, executed by every thread.
void FromAllThreads(const CallSpec& spec, int repeats,
                    const std::function<void(const CustomCall&, int thread)>& execute) {
  const std::unique_ptr<CustomCall> call = MakeCall(spec);
  InThreads(kThreads, [&](int thread) {
    for (int i = 0; i < repeats; ++i) execute(*call, thread);
  });
}

void Buffers() {
  FromAllThreads({"Scale", {{"factor", Float(2)}}, {Floats({10})}, {Floats({10})}}, 200,
                 [](const CustomCall& call, int thread) {
                   std::vector<float> x(10, static_cast<float>(thread)), y(10);
                   CheckOk(call.Execute({x.data()}, {y.data()}, {}));
                   CHECK(y[9] == 2.0f * static_cast<float>(thread));
                 });
  FromAllThreads({"Split", {}, {Floats({2, 0})}, {Floats({2, 0}), Ints({2})}}, 50,
                 [](const CustomCall& call, int) {
                   int64_t sizes[2];
                   CheckOk(call.Execute({nullptr}, {nullptr, sizes}, {}));
                   CHECK(sizes[0] == 0 && sizes[1] == 2);
                 });
  const std::vector<TensorType> many(40, Floats({3}));
  FromAllThreads(
      {"SumAll", {}, many, {Floats({}), Floats({})}}, 50, [&](const CustomCall& call, int) {
        std::vector<float> x = {1, 2, 3};
        float sums[2];
        CheckOk(call.Execute(std::vector<void*>(many.size(), x.data()), {&sums[0], &sums[1]}, {}));
        CHECK(sums[0] == 240 && sums[1] == 241);
      });
  const TensorType token = {17, {}};
  FromAllThreads({"TokenPass", {}, {token, Floats({2})}, {token, Floats({2})}}, 50,
                 [](const CustomCall& call, int) {
                   float x[2] = {1, 2}, y[2];
                   CheckOk(call.Execute({nullptr, x}, {nullptr, y}, {}));
                   CHECK(y[1] == 2);
                   CHECK(!call.Execute({nullptr, nullptr}, {nullptr, y}, {}).ok());
                   CHECK(!call.Execute({nullptr}, {nullptr, y}, {}).ok());
                 });
}

void AllKindsOfAttributes() {
  const auto write = [](const CustomCall& call, int) {
    char text[200];
    CheckOk(call.Execute({}, {text}, {}));
    CHECK(std::strlen(text) > 5);
  };
  FromAllThreads({"Scalars",
                  {{"b", Scalar<uint8_t>(XLA_FFI_PRED, 1)},
                   {"s8", Scalar<int8_t>(XLA_FFI_S8, -1)},
                   {"s16", Scalar<int16_t>(XLA_FFI_S16, -1)},
                   {"s32", Int32(-1)},
                   {"s64", Int(-1)},
                   {"u8", Scalar<uint8_t>(XLA_FFI_U8, 1)},
                   {"u16", Scalar<uint16_t>(XLA_FFI_U16, 1)},
                   {"u32", Scalar<uint32_t>(XLA_FFI_U32, 1)},
                   {"u64", Scalar<uint64_t>(XLA_FFI_U64, 1)},
                   {"f32", Float(1)},
                   {"f64", Scalar<double>(XLA_FFI_F64, 1)},
                   {"text", Text("a text")},
                   {"mode", Int32(2)}},
                  {},
                  {Bytes({200})}},
                 50, write);
  FromAllThreads({"Complex", {{"c64", Scalar<uint64_t>(XLA_FFI_C64, 0)}}, {}, {Bytes({200})}}, 50,
                 write);
  FromAllThreads({"Arrays",
                  {{"u8", Array<uint8_t>(XLA_FFI_U8, {1, 2, 3})},
                   {"s8", Array<int8_t>(XLA_FFI_S8, {1})},
                   {"s32", Array<int32_t>(XLA_FFI_S32, {1, 2, 3, 4, 5})},
                   {"s64", Array<int64_t>(XLA_FFI_S64, {1, 2})},
                   {"f32", Array<float>(XLA_FFI_F32, {1, 2, 3})},
                   {"f64", Array<double>(XLA_FFI_F64, {1})},
                   {"none", Array<int64_t>(XLA_FFI_S64, {})}},
                  {},
                  {Bytes({200})}},
                 50, write);
  const AttributeValue inner = Dictionary({{"text", Text("deep")}, {"a", Int(1)}});
  FromAllThreads({"Dictionaries",
                  {{"outer", Dictionary({{"number", Float(1)}, {"inner", inner}})},
                   {"range", Dictionary({{"low", Int(1)}, {"high", Int(2)}})}},
                  {},
                  {Bytes({200})}},
                 50, write);
  FromAllThreads({"AllAttributes", {{"zebra", Int32(1)}, {"apple", Int32(2)}}, {}, {Bytes({200})}},
                 50, write);
  for (const Attributes& bad :
       {Attributes{{"a", Int(1)}, {"a", Int(2)}}, Attributes{{"a", Scalar<char>(99, 0)}},
        Attributes{{"d", Dictionary({{"a", Scalar<char>(XLA_FFI_F32, 0)}})}}}) {
    CHECK(!CustomCall::Create({"Nothing", bad, {}, {}}).ok());
  }
}

void Stages() {
  const int64_t before = NumCounters();
  const CallSpec spec = {"Count", {{"start", Int(5)}}, {}, {Ints({3})}};
  FromAllThreads(spec, 100, [](const CustomCall& call, int) {
    int64_t out[3];
    CheckOk(call.Execute({}, {out}, {}));
    CHECK(out[1] == 105 && out[2] == 1105);
  });
  InThreads(kThreads, [&](int) {
    for (int i = 0; i < 50; ++i) {
      const std::unique_ptr<CustomCall> call = MakeCall(spec);
      int64_t out[3];
      CheckOk(call->Execute({}, {out}, {}));
      CHECK(out[0] == 5);
      CheckError(CustomCall::Create({"Count", {{"start", Int(-1)}}, {}, {Ints({3})}}).status(),
                 Code::kInternal, "[instantiate] start");
    }
  });
  CHECK(NumCounters() == before);
}

void Contexts() {
  for (int64_t size : {int64_t{0}, int64_t{100}, int64_t{1} << 20}) {
    FromAllThreads(
        {"Scratch", {{"size", Int(size)}, {"alignment", Int(64)}}, {Floats({10})}, {Floats({10})}},
        50, [](const CustomCall& call, int) {
          float x[10] = {}, y[10];
          CheckOk(call.Execute({x}, {y}, {}));
        });
  }
  for (const char* target : {"Pool", "NestedPool"}) {
    FromAllThreads({target, {{"tasks", Int(8)}}, {}, {Ints({})}}, 10,
                   [](const CustomCall& call, int) {
                     int64_t sum;
                     CheckOk(call.Execute({}, {&sum}, {}));
                     CHECK(sum == 28);
                   });
  }
  FromAllThreads({"UserDataNumber", {}, {}, {Ints({})}}, 50,
                 [](const CustomCall& call, int thread) {
                   int64_t number = thread, out = -1;
                   UserData user_data;
                   CheckOk(user_data.Add(*PayloadTypeId(), &number));
                   CheckOk(call.Execute({}, {&out}, {&user_data, NewRunId(), 0}));
                   CHECK(out == thread);
                   CheckError(call.Execute({}, {&out}, {}), Code::kInvalidArgument, "no user data");
                 });
  FromAllThreads({"Stream", {}, {}, {Ints({})}}, 20, [](const CustomCall& call, int) {
    int64_t out;
    CheckError(call.Execute({}, {&out}, {}), Code::kInvalidArgument, "no stream");
  });
}

void Errors() {
  FromAllThreads({"Fail", {{"code", Int32(15)}, {"message", Text("a message")}}, {}, {Ints({})}},
                 50, [](const CustomCall& call, int) {
                   int64_t out;
                   CheckError(call.Execute({}, {&out}, {}), Code::kDataLoss, "[execute] a message");
                 });
  for (const char* what : {"runtime_error", "special", "bad_alloc", "int", "unusual", "rethrown"}) {
    FromAllThreads({"Throw", {{"what", Text(what)}}, {}, {Ints({})}}, 20,
                   [](const CustomCall& call, int) {
                     int64_t out;
                     const Status status = call.Execute({}, {&out}, {});
                     CHECK(status.message().find("threw a C++ exception") != std::string::npos);
                   });
  }
  for (const char* error : {"", "lost"}) {
    FromAllThreads(
        {"Async", {{"delay_ms", Int(1)}, {"error", Text(error)}}, {Floats({3})}, {Floats({3})}}, 10,
        [&](const CustomCall& call, int) {
          float x[3] = {1, 2, 3}, y[3];
          const Status status = call.Execute({x}, {y}, {});
          CHECK(y[2] == 4);
          CHECK(status.ok() == (*error == '\0'));
        });
  }
  CheckError(CustomCall::Create({"nobody", {}, {}, {}}).status(), Code::kNotFound, "nobody");
}

// Handlers of every version of the ABI.
void OldLayouts() {
  for (const auto& [name, function] :
       {std::pair{"Raw01First", &Raw01First}, std::pair{"Raw01Later", &Raw01Later},
        std::pair{"Raw02", &Raw02}, std::pair{"Raw03", &Raw03}, std::pair{"Raw05", &Raw05}}) {
    HandlerStages stages = Execute(function);
    stages.instantiate = stages.execute;
    CheckOk(RegisterHandler(name, stages));
    const std::unique_ptr<CustomCall> call = MakeCall({name, {}, {}, {Ints({3})}});
    int64_t out[3] = {};
    CheckError(call->Execute({}, {out}, {}), Code::kUnavailable, "the future's error");
    CHECK(out[0] == 1);
  }
}

}  // namespace
}  // namespace jfm::pjrt

int main() {
  using namespace jfm::pjrt;
  Register();
  Buffers();
  AllKindsOfAttributes();
  Stages();
  Contexts();
  Errors();
  OldLayouts();
  std::puts("custom calls: good");
  return 0;
}
