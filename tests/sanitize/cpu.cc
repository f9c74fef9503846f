// Driver: the CPU kernels, here compiled for every instruction set of this machine with the
// sanitizer's checks, and what hands them threads and memory.
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plugin/cpu/isa.h"
#include "plugin/cpu/scratch.h"
#include "plugin/cpu/workers.h"
#include "plugin/device/software/software_device.h"
#include "tests/sanitize/attention_case.h"
#include "tests/sanitize/driver.h"

namespace jfm {
namespace {

// ---- Threads ---------------------------------------------------------------------------

using Task = std::pair<void (*)(void*), void*>;

// A pool of a fixed number of threads, which may have less than it promises to be free, as
// XLA's. Runs what is left when it is destroyed.
class Pool : public cpu::HelperSource {
 public:
  explicit Pool(int num_threads) {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Work(); });
  }
  ~Pool() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    for (const Task& task : tasks_) task.first(task.second);
  }
  bool Schedule(void (*task)(void*), void* data) override {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.emplace_back(task, data);
    changed_.notify_one();
    ++num_scheduled_;
    return true;
  }
  int num_scheduled() const { return num_scheduled_; }

 private:
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return ends_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const Task task = tasks_.front();
      tasks_.pop_front();
      lock.unlock();
      task.first(task.second);
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool ends_ = false;
  std::atomic<int> num_scheduled_{0};
  std::vector<std::thread> threads_;
};

class AtOnce : public cpu::HelperSource {
 public:
  bool Schedule(void (*task)(void*), void* data) override {
    task(data);
    return true;
  }
};

class Refuses : public cpu::HelperSource {
 public:
  bool Schedule(void (*)(void*), void*) override {
    ++num_asked;
    return false;
  }
  int num_asked = 0;
};

// Counts how often each block ran, and that no two calls with a worker's number overlap.
struct Count {
  Count(int64_t num_blocks, int max_workers) : runs(num_blocks), is_busy(max_workers) {}

  static void Body(void* context, int64_t block, int worker) {
    Count& count = *static_cast<Count*>(context);
    CHECK(worker >= 0 && worker < static_cast<int>(count.is_busy.size()));
    CHECK(!count.is_busy[worker].exchange(true));
    if (block % 5 == 0) std::this_thread::yield();
    count.runs[block].fetch_add(1);
    CHECK(count.is_busy[worker].exchange(false));
  }

  std::vector<std::atomic<int>> runs;
  std::vector<std::atomic<bool>> is_busy;
};

void RunsEachBlockOnce(cpu::HelperSource* helpers, int num_threads, int64_t num_blocks) {
  cpu::Workers workers(helpers, num_threads);
  Count count(num_blocks, workers.max_workers(num_blocks));
  workers.Run(num_blocks, &Count::Body, &count);
  for (const std::atomic<int>& runs : count.runs) CHECK(runs.load() == 1);
}

constexpr int64_t kNumBlocks[] = {0, 1, 2, 7, 300};

void RunsEachBlockOnce() {
  for (int num_threads : {1, 2, 8}) {
    for (int64_t num_blocks : kNumBlocks) {
      Pool threads(2), nobody(0);  // the latter's tasks run when the call has returned
      AtOnce at_once;
      Refuses refuses;
      for (cpu::HelperSource* helpers : std::initializer_list<cpu::HelperSource*>{
               nullptr, &threads, &nobody, &at_once, &refuses}) {
        RunsEachBlockOnce(helpers, num_threads, num_blocks);
      }
      CHECK(refuses.num_asked <= 1);  // who is refused once does not ask again
      for (int i = 0; i < 20; ++i) RunsEachBlockOnce(&threads, num_threads, num_blocks);
    }
  }
}

class Counts : public cpu::HelperSource {
 public:
  bool Schedule(void (*task)(void*), void* data) override {
    ++num_scheduled;
    task(data);
    return true;
  }
  int num_scheduled = 0;
};

void AsksForNoMoreHelpersThanBlocks() {
  for (int num_threads : {1, 2, 8}) {
    for (int64_t num_blocks : kNumBlocks) {
      Counts counts;
      RunsEachBlockOnce(&counts, num_threads, num_blocks);
      const int64_t most = std::min<int64_t>(num_threads, num_blocks) - 1;
      CHECK(counts.num_scheduled == std::max<int64_t>(most, 0));
    }
  }
}

// Callers that are themselves tasks of the pool, as XLA's handlers may be, more of them than
// threads; each of their blocks runs blocks again.
void NestsFromManyThreads() {
  Pool pool(2);
  struct Outer {
    Pool* pool;
    std::atomic<int> num_done{0};
  } outer{&pool};
  const auto call = [](void* data) {
    Outer& o = *static_cast<Outer*>(data);
    cpu::Workers workers(o.pool, 4);
    const auto body = [](void* context, int64_t, int) {
      RunsEachBlockOnce(static_cast<Pool*>(context), 3, 5);
    };
    workers.Run(6, body, o.pool);
    ++o.num_done;
  };
  for (int i = 0; i < 24; ++i) CHECK(pool.Schedule(call, &outer));
  InThreads(4, [&](int) { call(&outer); });
  while (outer.num_done < 28) std::this_thread::yield();
}

// ---- Memory ----------------------------------------------------------------------------

void GivesMemory() {
  InThreads(4, [](int thread) {
    for (int round = 0; round < 30; ++round) {
      for (size_t size : {size_t{1}, size_t{5000}, size_t{1} << 17, size_t{5} << 20}) {
        cpu::Scratch first(size), second(size * 2);
        CHECK(first.data() != nullptr && second.data() != nullptr);
        CHECK(reinterpret_cast<uintptr_t>(first.data()) % 64 == 0);
        std::memset(first.data(), thread, size);
        std::memset(second.data(), ~thread, 2 * size);
        CHECK(first.data()[size - 1] == static_cast<char>(thread));
        CHECK(second.data()[0] == static_cast<char>(~thread));
      }
    }
  });
  CHECK(cpu::Scratch(size_t{1} << 60).data() == nullptr);
}

// ---- Kernels ---------------------------------------------------------------------------

constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16};

std::vector<Shape> Shapes() {
  std::vector<Shape> shapes;
  for (Dtype dtype : kDtypes) {
    Shape plain;
    plain.dtype = dtype;
    shapes.push_back(plain);
    Shape causal = plain;
    causal.is_causal = true;
    causal.q_len = causal.kv_len = 150;
    causal.head_dim = 60;
    causal.value_head_dim = 40;
    shapes.push_back(causal);
    Shape features = plain;
    features.is_causal = features.has_features = true;
    shapes.push_back(features);
    Shape decode = features;
    decode.q_len = 3;
    decode.kv_len = 701;
    shapes.push_back(decode);
  }
  return shapes;
}

float ToFloat(const char* data, Dtype dtype) {
  uint32_t bits = 0;
  std::memcpy(&bits, data, static_cast<size_t>(SizeBytes(dtype)));
  if (dtype == Dtype::kBfloat16) bits <<= 16;
  if (dtype == Dtype::kFloat16) {  // finite ones; subnormal ones are as good as zero here
    const uint32_t exponent = bits >> 10 & 31;
    bits = (bits & 0x8000) << 16 | (exponent != 0 ? (exponent + 112) << 23 : 0) |
           (bits & 0x3ff) << 13;
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Not to prove the kernels right, which the contract's tests do: to see that this build of
// them computes the same.
void CheckClose(Attention& got, Attention& expected, const Shape& shape, size_t memory) {
  const TensorSpec spec = got.Spec(memory);
  const Dtype dtype = spec.element == Element::kFloat32 ? Dtype::kFloat32 : shape.dtype;
  const float tolerance = shape.dtype == Dtype::kFloat32 ? 1e-4f : 6e-2f;
  const size_t width = static_cast<size_t>(SizeBytes(dtype));
  float size = 1;
  if (memory >= kGradientTensor) {  // sums, which may be less than what they are sums of
    for (size_t at = 0; at < got.Bytes(memory); at += width) {
      size = std::max(size, std::abs(ToFloat(expected.Data(memory) + at, dtype)));
    }
  }
  for (size_t at = 0; at < got.Bytes(memory); at += width) {
    const float x = ToFloat(got.Data(memory) + at, dtype);
    const float y = ToFloat(expected.Data(memory) + at, dtype);
    const float largest = std::max({size, std::abs(x), std::abs(y)});
    if (x == y || std::abs(x - y) <= tolerance * largest) continue;
    std::string name = spec.name;
    if (memory >= kGradientTensor) name += " " + std::to_string(memory - kGradientTensor);
    std::fprintf(stderr, "%s %s %s at byte %zu: %g, but the software device has %g\n",
                 cpu::ChosenKernels().name, Name(shape.dtype), name.c_str(), at,
                 static_cast<double>(x), static_cast<double>(y));
    std::exit(1);
  }
}

// The memory of all results of all passes that there are.
std::vector<size_t> Results(const Shape& shape) {
  std::vector<size_t> results;
  for (Operand result : {Operand::kOut, Operand::kLogsumexp, Operand::kDquery, Operand::kDkey,
                         Operand::kDvalue}) {
    results.push_back(Index(result));
  }
  if (!shape.has_features) return results;
  for (GradientOf of : {GradientOf::kBias, GradientOf::kSinks, GradientOf::kSlopes}) {
    results.push_back(Attention::GradientMemory(of));
  }
  return results;
}

void ComputesTheSame() {
  Pool pool(3);
  for (const Shape& shape : Shapes()) {
    Attention expected(shape);
    CheckOk(expected.Run(SoftwareDevice()));
    for (const cpu::Kernels* kernels : cpu::SupportedKernels()) {
      CHECK(cpu::ForceKernels(kernels->name));
      Attention alone(shape);
      cpu::Workers nobody(nullptr, 1);
      CheckOk(alone.Run(nobody));
      for (size_t result : Results(shape)) CheckClose(alone, expected, shape, result);
      for (int num_threads : {2, 5}) {
        // Aligned as much as a vector of NEON, or only as a float32.
        Attention got(shape, num_threads == 2 ? 16 : 4);
        cpu::Workers workers(&pool, num_threads);
        const int before = pool.num_scheduled();
        CheckOk(got.Run(workers));
        CHECK(pool.num_scheduled() > before);
        CHECK(got == alone);
      }
      // Many at once, which share the pool and the memory that is kept.
      InThreads(3, [&](int) {
        Attention got(shape);
        cpu::Workers workers(&pool, 2);
        CheckOk(got.Run(workers));
        CHECK(got == alone);
      });
    }
  }
  CHECK(!cpu::ForceKernels("no such"));
  CHECK(cpu::ForceKernels(""));
}

// Sizes of zero and one, and blocks that end in the middle.
void TakesAnySize() {
  Pool pool(1);
  for (const cpu::Kernels* kernels : cpu::SupportedKernels()) {
    CHECK(cpu::ForceKernels(kernels->name));
    for (int64_t q_len : {0, 1, 65}) {
      for (int64_t kv_len : {0, 1, 130}) {
        for (Dtype dtype : kDtypes) {
          Shape shape;
          shape.dtype = dtype;
          shape.q_len = q_len;
          shape.kv_len = kv_len;
          shape.num_heads = 2;
          shape.num_kv_heads = 1;
          shape.head_dim = 1 + q_len % 7;
          shape.value_head_dim = 1 + kv_len % 5;
          for (bool has_features : {false, true}) {
            shape.has_features = has_features;
            for (int64_t batch : {0, 1}) {
              shape.batch = batch;
              Attention attention(shape, 4);
              cpu::Workers workers(&pool, 2);
              CheckOk(attention.Run(workers));
            }
          }
        }
      }
    }
  }
  CHECK(cpu::ForceKernels(""));
}

}  // namespace
}  // namespace jfm

int main() {
  jfm::RunsEachBlockOnce();
  jfm::AsksForNoMoreHelpersThanBlocks();
  jfm::NestsFromManyThreads();
  jfm::GivesMemory();
  jfm::ComputesTheSame();
  jfm::TakesAnySize();
  std::puts("cpu: good");
  return 0;
}
