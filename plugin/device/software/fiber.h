// Fibers: one stack per lane of a threadgroup and the switch between them. Knows nothing
// of Metal.
#pragma once

#include <cstddef>

namespace jfm {

// Saves the callee-saved registers on the current stack and its pointer in *save, then
// continues the fiber whose saved pointer is `to`.
extern "C" void jfm_fiber_switch(void** save, void* to);

// Stacks of equal size; only what a lane touches takes memory.
class FiberStacks {
 public:
  explicit FiberStacks(size_t count);
  ~FiberStacks();
  FiberStacks(const FiberStacks&) = delete;
  FiberStacks& operator=(const FiberStacks&) = delete;

  bool ok() const { return memory_ != nullptr; }
  // A saved pointer from which jfm_fiber_switch starts `entry` on stack `index`.
  void* Prepare(size_t index, void (*entry)()) const;
  bool Contains(const void* address) const;

 private:
  size_t count_;
  char* memory_ = nullptr;
};

}  // namespace jfm
