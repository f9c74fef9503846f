// Fibers: one stack per lane of a threadgroup and the switch between them. Knows nothing
// of Metal.
#pragma once

#include <cstddef>

// AddressSanitizer and ThreadSanitizer must know which stack the code is on: under them, a
// switch goes through fiber_sanitizer.cc.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define JFM_SANITIZED_FIBERS 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define JFM_SANITIZED_FIBERS 1
#endif
#endif

namespace jfm {

// Saves the callee-saved registers on the current stack and its pointer in *save, then
// continues the fiber whose saved pointer is `to`.
extern "C" void jfm_fiber_switch(void** save, void* to);
#ifdef JFM_SANITIZED_FIBERS
void SwitchFiber(void** save, void* to);
#else
inline void SwitchFiber(void** save, void* to) { jfm_fiber_switch(save, to); }
#endif

// Stacks of equal size; only what a lane touches takes memory.
class FiberStacks {
 public:
  explicit FiberStacks(size_t count);
  ~FiberStacks();
  FiberStacks(const FiberStacks&) = delete;
  FiberStacks& operator=(const FiberStacks&) = delete;

  bool ok() const { return memory_ != nullptr; }
  // A saved pointer from which SwitchFiber starts `entry` on stack `index`.
  void* Prepare(size_t index, void (*entry)()) const;
  bool Contains(const void* address) const;

 private:
  size_t count_;
  char* memory_ = nullptr;
};

#ifdef JFM_SANITIZED_FIBERS
// For FiberStacks. The calling thread is about to start `entry` on this stack, whatever
// was there before; it must start the function that this returns.
void (*AnnounceFiber(char* stack, size_t size, void (*entry)()))();
// These stacks go.
void ForgetFibers(char* stacks, size_t size);
#endif

}  // namespace jfm
