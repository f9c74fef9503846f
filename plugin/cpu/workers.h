// Work in blocks on somebody else's threads: the caller works through the blocks itself, and
// helpers, if any come, claim blocks by an atomic counter. Nobody waits for a helper that has
// not started: XLA's pool may have no free thread until this call returns.
//
// noexcept, so that the kernels' files need no code for unwinding, which would be the linker's
// to share between them.
#pragma once

#include <cstdint>

namespace jfm::cpu {

// Threads of a call, the caller among them: as many as it has CPUs, or what SetNumThreads said
// last; 0 there takes that back.
int NumThreads();
void SetNumThreads(int num_threads);
bool HasSetNumThreads();  // and not taken back

// Where helpers come from: XLA's thread pool (plugin/ffi), threads of our own (plugin/c_api).
class HelperSource {
 public:
  virtual ~HelperSource() = default;
  // Has task(data) called once, at any later time or now; false: it will not be.
  virtual bool Schedule(void (*task)(void*), void* data) = 0;
};

class Workers {
 public:
  // `helpers` may be null: nobody helps. num_threads: as many as can run at once, the caller
  // among them.
  Workers(HelperSource* helpers, int num_threads) : helpers_(helpers), num_threads_(num_threads) {}

  int num_threads() const noexcept { return num_threads_; }

  // Calls body(context, block, worker) once for every block of [0, num_blocks), claimed in
  // ascending order; when it returns all calls have returned. `worker`: below
  // max_workers(num_blocks), never the same for two calls at the same time. The body must not
  // throw.
  void Run(int64_t num_blocks, void (*body)(void* context, int64_t block, int worker),
           void* context) noexcept;
  int max_workers(int64_t num_blocks) const noexcept {
    return num_blocks < num_threads_ ? static_cast<int>(num_blocks) : num_threads_;
  }

 private:
  HelperSource* helpers_;
  int num_threads_;
};

}  // namespace jfm::cpu
