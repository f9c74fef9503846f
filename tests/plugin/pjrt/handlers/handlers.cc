// Third-party handlers, written against the C++ API of whichever jaxlib is installed:
// its headers, its version of the API, its checks. They know nothing of this project.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <complex>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using F32 = ffi::Buffer<ffi::F32>;
using F64 = ffi::Buffer<ffi::F64>;
using S64 = ffi::Buffer<ffi::S64>;
using U8 = ffi::Buffer<ffi::U8>;

ffi::Error Failure(const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInternal, message);
}

// Text into a result of uint8, cut or padded with zeros.
void Write(std::string_view text, U8& out) {
  const size_t size = out.element_count();
  std::memset(out.typed_data(), 0, size);
  std::memcpy(out.typed_data(), text.data(), std::min(text.size(), size));
}

// -- Operands, results, simple attributes --------------------------------------------

ffi::Error ScaleImpl(F32 x, ffi::Result<F32> y, float factor) {
  for (size_t i = 0; i < x.element_count(); ++i) y->typed_data()[i] = factor * x.typed_data()[i];
  return ffi::Error::Success();
}

ffi::Error SplitImpl(F32 x, ffi::Result<F32> whole, ffi::Result<S64> sizes) {
  std::memmove(whole->typed_data(), x.typed_data(), x.size_bytes());
  sizes->typed_data()[0] = static_cast<int64_t>(x.element_count());
  sizes->typed_data()[1] = static_cast<int64_t>(x.dimensions().size());
  return ffi::Error::Success();
}

ffi::Error SumAllImpl(ffi::RemainingArgs args, ffi::RemainingRets rets) {
  for (size_t r = 0; r < rets.size(); ++r) {
    auto ret = rets.get<F32>(r);
    if (!ret.has_value()) return ret.error();
    float sum = 0;
    for (size_t a = 0; a < args.size(); ++a) {
      auto arg = args.get<F32>(a);
      if (!arg.has_value()) return arg.error();
      for (size_t i = 0; i < arg->element_count(); ++i) sum += arg->typed_data()[i];
    }
    (*ret)->typed_data()[0] = sum + static_cast<float>(r);
  }
  return ffi::Error::Success();
}

ffi::Error TokenImpl(ffi::Token, F32 x, ffi::Result<ffi::Token>, ffi::Result<F32> y) {
  std::memcpy(y->typed_data(), x.typed_data(), x.size_bytes());
  return ffi::Error::Success();
}

// -- Attributes of every type ----------------------------------------------------------

enum class Mode : int32_t { kFirst = 1, kSecond = 2 };

struct Range {
  int64_t low;
  int64_t high;
};

template <class T>
std::string Text(T value) {
  return std::to_string(value) + " ";
}

template <class T>
std::string Text(ffi::Span<const T> values) {
  std::string text = "[";
  for (T value : values) text += std::to_string(value) + " ";
  return text + "] ";
}

ffi::Error ScalarsImpl(ffi::Result<U8> out, bool b, int8_t s8, int16_t s16, int32_t s32,
                       int64_t s64, uint8_t u8, uint16_t u16, uint32_t u32, uint64_t u64, float f32,
                       double f64, std::string_view text, Mode mode) {
  Write(Text(b) + Text(s8) + Text(s16) + Text(s32) + Text(s64) + Text(u8) + Text(u16) + Text(u32) +
            Text(u64) + Text(f32) + Text(f64) + std::string(text) + " " +
            Text(static_cast<int32_t>(mode)),
        *out);
  return ffi::Error::Success();
}

// JAX cannot express it.
ffi::Error ComplexImpl(ffi::Result<U8> out, std::complex<float> c64) {
  Write(Text(c64.real()) + Text(c64.imag()), *out);
  return ffi::Error::Success();
}

ffi::Error ArraysImpl(ffi::Result<U8> out, ffi::Span<const uint8_t> u8, ffi::Span<const int8_t> s8,
                      ffi::Span<const int32_t> s32, ffi::Span<const int64_t> s64,
                      ffi::Span<const float> f32, ffi::Span<const double> f64,
                      ffi::Span<const int64_t> none) {
  Write(Text(u8) + Text(s8) + Text(s32) + Text(s64) + Text(f32) + Text(f64) + Text(none), *out);
  return ffi::Error::Success();
}

ffi::Error DictionariesImpl(ffi::Result<U8> out, ffi::Dictionary outer, Range range) {
  auto number = outer.get<float>("number");
  if (!number.has_value()) return number.error();
  std::string text = Text(*number) + Text(outer.size()) + Text(range.low) + Text(range.high);
  if (outer.contains("inner")) {
    auto inner = outer.get<ffi::Dictionary>("inner");
    if (!inner.has_value()) return inner.error();
    auto deep = inner->get<std::string_view>("text");
    if (!deep.has_value()) return deep.error();
    text += std::string(*deep) + " " + Text(inner->size());
  }
  Write(text, *out);
  return ffi::Error::Success();
}

ffi::Error AllAttributesImpl(ffi::Result<U8> out, ffi::Dictionary attributes) {
  auto zebra = attributes.get<int32_t>("zebra");
  if (!zebra.has_value()) return zebra.error();
  auto apple = attributes.get<int32_t>("apple");
  if (!apple.has_value()) return apple.error();
  Write(Text(*apple) + Text(*zebra) + Text(attributes.contains("pear")), *out);
  return ffi::Error::Success();
}

// -- Stages and states -----------------------------------------------------------------

struct Counter {
  static ffi::TypeId id;
  explicit Counter(int64_t start) : value(start) { ++alive; }
  ~Counter() { --alive; }
  std::atomic<int64_t> value;
  static std::atomic<int64_t> alive;
};
ffi::TypeId Counter::id = {};
std::atomic<int64_t> Counter::alive{0};

ffi::ErrorOr<std::unique_ptr<Counter>> InstantiateImpl(int64_t start) {
  if (start < 0) return ffi::Unexpected(Failure("start must not be negative"));
  return std::make_unique<Counter>(start);
}

std::atomic<int64_t> num_prepared{0};
std::atomic<int64_t> num_initialized{0};

#if XLA_FFI_API_MINOR >= 3
// Stages may have states of their own.
ffi::ErrorOr<std::unique_ptr<Counter>> PrepareImpl(int64_t start) {
  ++num_prepared;
  return std::make_unique<Counter>(start + 100);
}
ffi::ErrorOr<std::unique_ptr<Counter>> InitializeImpl(Counter* prepared, int64_t) {
  ++num_initialized;
  return std::make_unique<Counter>(prepared->value + 1000);
}
ffi::Error CountImpl(Counter* counter, Counter* prepared, Counter* initialized,
                     ffi::Result<S64> out, int64_t) {
  out->typed_data()[0] = counter->value.fetch_add(1);
  out->typed_data()[1] = prepared->value;
  out->typed_data()[2] = initialized->value;
  return ffi::Error::Success();
}
#else
ffi::Error PrepareImpl(ffi::Result<S64>, int64_t) {
  ++num_prepared;
  return ffi::Error::Success();
}
ffi::Error InitializeImpl(ffi::Result<S64>, int64_t) {
  ++num_initialized;
  return ffi::Error::Success();
}
ffi::Error CountImpl(Counter* counter, ffi::Result<S64> out, int64_t start) {
  out->typed_data()[0] = counter->value.fetch_add(1);
  out->typed_data()[1] = start + 100;
  out->typed_data()[2] = start + 1100;
  return ffi::Error::Success();
}
#endif

// -- Contexts ---------------------------------------------------------------------------

ffi::Error ScratchImpl(ffi::ScratchAllocator scratch, F32 x, ffi::Result<F32> y, int64_t size,
                       int64_t alignment) {
  std::optional<void*> memory = scratch.Allocate(size, alignment);
  if (!memory.has_value()) return Failure("no scratch memory");
  if (reinterpret_cast<uintptr_t>(*memory) % 64 != 0) return Failure("not aligned");
  if (size >= static_cast<int64_t>(x.size_bytes())) {
    std::memcpy(*memory, x.typed_data(), x.size_bytes());
    std::memcpy(y->typed_data(), *memory, x.size_bytes());
  }
  return ffi::Error::Success();
}

// Counts down to zero; the last one wakes whoever waits.
class Latch {
 public:
  explicit Latch(int64_t count) : count_(count) {}
  void CountDown() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--count_ == 0) done_.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return count_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  int64_t count_;
};

ffi::Error PoolImpl(ffi::ThreadPool pool, ffi::Result<S64> out, int64_t tasks) {
  std::vector<int64_t> done(tasks, 0);
  auto latch = std::make_shared<Latch>(tasks);
  for (int64_t i = 0; i < tasks; ++i) {
    pool.Schedule([&done, latch, i] {
      done[i] = i;
      latch->CountDown();
    });
  }
  latch->Wait();
  int64_t sum = 0;
  for (int64_t value : done) sum += value;
  out->typed_data()[0] = sum;
  return ffi::Error::Success();
}

// What a pool of fixed size cannot do: tasks that wait for tasks, which wait for each
// other, with a lock held while they are scheduled.
ffi::Error NestedPoolImpl(ffi::ThreadPool pool, ffi::Result<S64> out, int64_t tasks) {
  auto everyone_is_here = std::make_shared<Latch>(tasks);
  auto all_done = std::make_shared<Latch>(tasks);
  std::mutex mutex;
  int64_t sum = 0;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (int64_t i = 0; i < tasks; ++i) {
      pool.Schedule([&, i, pool, everyone_is_here, all_done]() mutable {
        auto inner = std::make_shared<Latch>(1);
        pool.Schedule([inner] { inner->CountDown(); });
        inner->Wait();
        everyone_is_here->CountDown();
        everyone_is_here->Wait();
        {
          std::lock_guard<std::mutex> inner_lock(mutex);
          sum += i;
        }
        all_done->CountDown();
      });
    }
  }
  all_done->Wait();
  out->typed_data()[0] = sum;
  return ffi::Error::Success();
}

struct Payload {
  static ffi::TypeId id;
  int64_t number;
};
ffi::TypeId Payload::id = {};

ffi::Error UserDataImpl(Payload* payload, ffi::Result<S64> out) {
  out->typed_data()[0] = payload->number;
  return ffi::Error::Success();
}

ffi::Error StreamImpl(void*, ffi::Result<S64>) { return ffi::Error::Success(); }

#if XLA_FFI_API_MINOR >= 3
ffi::Error IdsImpl(ffi::RunId run_id, int32_t device_ordinal, ffi::ThreadPool pool,
                   ffi::Result<S64> out) {
  out->typed_data()[0] = run_id.run_id;
  out->typed_data()[1] = device_ordinal;
  out->typed_data()[2] = pool.num_threads();
  return ffi::Error::Success();
}
#endif

// -- Errors and futures -----------------------------------------------------------------

ffi::Error FailImpl(ffi::Result<S64>, int32_t code, std::string_view message) {
  return ffi::Error(static_cast<XLA_FFI_Error_Code>(code), std::string(message));
}

struct Unusual {
  int number = 1;
};
struct Special : std::runtime_error {
  using std::runtime_error::runtime_error;
};

ffi::Error ThrowImpl(ffi::Result<S64>, std::string_view what) {
  const std::string cleaned_up_by_the_unwinder(100, 'x');
  if (what == "runtime_error") throw std::runtime_error("a thrown message");
  if (what == "special") throw Special("a special message");
  if (what == "bad_alloc") throw std::bad_alloc();
  if (what == "int") throw 42;
  if (what == "unusual") throw Unusual();
  if (what == "rethrown") {
    try {
      throw std::runtime_error("thrown twice");
    } catch (...) {
      std::rethrow_exception(std::current_exception());
    }
  }
  return ffi::Error::Success();
}

ffi::Future AsyncImpl(F32 x, ffi::Result<F32> y, int64_t delay_ms, std::string_view error) {
  auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);
  std::thread([=, error = std::string(error)]() mutable {
    std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
    for (size_t i = 0; i < x.element_count(); ++i) y->typed_data()[i] = 1 + x.typed_data()[i];
    if (error.empty()) {
      promise->SetAvailable();
    } else {
      promise->SetError(ffi::Error(ffi::ErrorCode::kDataLoss, error));
    }
  }).detach();
  return future;
}

ffi::Error NothingImpl(ffi::RemainingArgs, ffi::RemainingRets) { return ffi::Error::Success(); }

}  // namespace

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(Mode);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(Range, ffi::StructMember<int64_t>("low"),
                                      ffi::StructMember<int64_t>("high"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(Scale, ScaleImpl,
                              ffi::Ffi::Bind().Arg<F32>().Ret<F32>().Attr<float>("factor"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(Split, SplitImpl, ffi::Ffi::Bind().Arg<F32>().Ret<F32>().Ret<S64>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SumAll, SumAllImpl, ffi::Ffi::Bind().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    TokenPass, TokenImpl,
    ffi::Ffi::Bind().Arg<ffi::Token>().Arg<F32>().Ret<ffi::Token>().Ret<F32>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(Scalars, ScalarsImpl,
                              ffi::Ffi::Bind()
                                  .Ret<U8>()
                                  .Attr<bool>("b")
                                  .Attr<int8_t>("s8")
                                  .Attr<int16_t>("s16")
                                  .Attr<int32_t>("s32")
                                  .Attr<int64_t>("s64")
                                  .Attr<uint8_t>("u8")
                                  .Attr<uint16_t>("u16")
                                  .Attr<uint32_t>("u32")
                                  .Attr<uint64_t>("u64")
                                  .Attr<float>("f32")
                                  .Attr<double>("f64")
                                  .Attr<std::string_view>("text")
                                  .Attr<Mode>("mode"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(Complex, ComplexImpl,
                              ffi::Ffi::Bind().Ret<U8>().Attr<std::complex<float>>("c64"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(Arrays, ArraysImpl,
                              ffi::Ffi::Bind()
                                  .Ret<U8>()
                                  .Attr<ffi::Span<const uint8_t>>("u8")
                                  .Attr<ffi::Span<const int8_t>>("s8")
                                  .Attr<ffi::Span<const int32_t>>("s32")
                                  .Attr<ffi::Span<const int64_t>>("s64")
                                  .Attr<ffi::Span<const float>>("f32")
                                  .Attr<ffi::Span<const double>>("f64")
                                  .Attr<ffi::Span<const int64_t>>("none"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Dictionaries, DictionariesImpl,
    ffi::Ffi::Bind().Ret<U8>().Attr<ffi::Dictionary>("outer").Attr<Range>("range"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(AllAttributes, AllAttributesImpl, ffi::Ffi::Bind().Ret<U8>().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CountInstantiate, InstantiateImpl,
                              ffi::Ffi::BindInstantiate().Attr<int64_t>("start"));
#if XLA_FFI_API_MINOR >= 3
XLA_FFI_DEFINE_HANDLER_SYMBOL(CountPrepare, PrepareImpl,
                              ffi::Ffi::BindPrepare().Attr<int64_t>("start"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CountInitialize, InitializeImpl,
    ffi::Ffi::BindInitialize().Ctx<ffi::Prepared<Counter>>().Attr<int64_t>("start"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(Count, CountImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<Counter>>()
                                  .Ctx<ffi::Prepared<Counter>>()
                                  .Ctx<ffi::Initialized<Counter>>()
                                  .Ret<S64>()
                                  .Attr<int64_t>("start"));
#else
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CountPrepare, PrepareImpl,
    ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>().Ret<S64>().Attr<int64_t>("start"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CountInitialize, InitializeImpl,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ret<S64>().Attr<int64_t>("start"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Count, CountImpl,
    ffi::Ffi::Bind().Ctx<ffi::State<Counter>>().Ret<S64>().Attr<int64_t>("start"));
#endif

XLA_FFI_DEFINE_HANDLER_SYMBOL(Scratch, ScratchImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .Arg<F32>()
                                  .Ret<F32>()
                                  .Attr<int64_t>("size")
                                  .Attr<int64_t>("alignment"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Pool, PoolImpl, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ret<S64>().Attr<int64_t>("tasks"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    NestedPool, NestedPoolImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ret<S64>().Attr<int64_t>("tasks"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(UserDataNumber, UserDataImpl,
                              ffi::Ffi::Bind().Ctx<ffi::UserData<Payload>>().Ret<S64>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Stream, StreamImpl,
                              ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ret<S64>());
#if XLA_FFI_API_MINOR >= 3
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Ids, IdsImpl,
    ffi::Ffi::Bind().Ctx<ffi::RunId>().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::ThreadPool>().Ret<S64>());
#endif

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Fail, FailImpl,
    ffi::Ffi::Bind().Ret<S64>().Attr<int32_t>("code").Attr<std::string_view>("message"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(Throw, ThrowImpl,
                              ffi::Ffi::Bind().Ret<S64>().Attr<std::string_view>("what"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(Async, AsyncImpl,
                              ffi::Ffi::Bind()
                                  .Arg<F32>()
                                  .Ret<F32>()
                                  .Attr<int64_t>("delay_ms")
                                  .Attr<std::string_view>("error"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(Nothing, NothingImpl,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets());

// -- For the test -----------------------------------------------------------------------

extern "C" int ApiMinor() { return XLA_FFI_API_MINOR; }
extern "C" int64_t* CounterTypeId() { return &Counter::id.type_id; }
extern "C" void DeleteCounter(void* counter) { delete static_cast<Counter*>(counter); }
extern "C" int64_t* PayloadTypeId() { return &Payload::id.type_id; }
extern "C" int64_t NumCounters() { return Counter::alive; }
extern "C" int64_t NumPrepared() { return num_prepared; }
extern "C" int64_t NumInitialized() { return num_initialized; }
