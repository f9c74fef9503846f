// Tells AddressSanitizer and ThreadSanitizer of every switch between stacks. Empty in all
// other builds.
#include "plugin/device/software/fiber.h"

#ifdef JFM_SANITIZED_FIBERS

#include <pthread.h>

#include <map>

#ifdef __SANITIZE_THREAD__
#define JFM_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define JFM_TSAN 1
#endif
#endif

#ifdef JFM_TSAN
#include <sanitizer/tsan_interface.h>
#else
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace jfm {
namespace {

struct Stack {
  char* bottom = nullptr;
  size_t size = 0;
  void (*entry)() = nullptr;
  void* sanitizer = nullptr;  // ThreadSanitizer's fiber, or AddressSanitizer's fake stack
  int uses = 0;               // of that fiber
};

// Not functions of their own: ThreadSanitizer would see them begin on one stack and end on
// the other.
#define JFM_INLINE inline __attribute__((always_inline))

#ifdef JFM_TSAN
JFM_INLINE void BeforeSwitch(Stack&, Stack& to) { __tsan_switch_to_fiber(to.sanitizer, 0); }
JFM_INLINE void AfterSwitch(Stack&) {}
void Forget(Stack& stack) {
  if (stack.sanitizer != nullptr) __tsan_destroy_fiber(stack.sanitizer);
}
// Lanes never return from their functions, so the sanitizer's list of those that a fiber
// is in grows by some with every use; it holds 65,536. A new fiber is costly.
void Renew(Stack& stack) {
  constexpr int kMaxUses = 1000;
  if (stack.sanitizer != nullptr && ++stack.uses < kMaxUses) return;
  Forget(stack);
  stack.sanitizer = __tsan_create_fiber(0);
  stack.uses = 0;
}
#else
JFM_INLINE void BeforeSwitch(Stack& from, Stack& to) {
  __sanitizer_start_switch_fiber(&from.sanitizer, to.bottom, to.size);
}
JFM_INLINE void AfterSwitch(Stack& now) {
  __sanitizer_finish_switch_fiber(now.sanitizer, nullptr, nullptr);
}
// Functions that a lane never returned from left their marks.
void Forget(Stack& stack) { ASAN_UNPOISON_MEMORY_REGION(stack.bottom, stack.size); }
void Renew(Stack& stack) {
  Forget(stack);
  stack.sanitizer = nullptr;
}
#endif

// Of one thread: a threadgroup never leaves the thread that runs it.
struct Stacks {
  std::map<char*, Stack> fibers;  // by the end of the stack
  Stack own;

  Stacks() {
    pthread_attr_t attributes;
    void* bottom = nullptr;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &bottom, &own.size);
    pthread_attr_destroy(&attributes);
    own.bottom = static_cast<char*>(bottom);
#ifdef JFM_TSAN
    own.sanitizer = __tsan_get_current_fiber();
#endif
  }

  ~Stacks() {
    for (auto& fiber : fibers) Forget(fiber.second);
  }

  Stack& At(void* address) {
    char* const place = static_cast<char*>(address);
    const auto found = fibers.upper_bound(place);
    return found != fibers.end() && place >= found->second.bottom ? found->second : own;
  }
};
Stacks& ThisThread() {
  thread_local Stacks stacks;
  return stacks;
}

void Begin() {
  Stack& stack = ThisThread().At(__builtin_frame_address(0));
  AfterSwitch(stack);
  stack.entry();
}

}  // namespace

void (*AnnounceFiber(char* stack, size_t size, void (*entry)()))() {
  Stack& fiber = ThisThread().fibers[stack + size];
  fiber.bottom = stack;
  fiber.size = size;
  fiber.entry = entry;
  Renew(fiber);
  return &Begin;
}

void ForgetFibers(char* stacks, size_t size) {
  auto& fibers = ThisThread().fibers;
  auto fiber = fibers.upper_bound(stacks);
  while (fiber != fibers.end() && fiber->second.bottom < stacks + size) {
    Forget(fiber->second);
    fiber = fibers.erase(fiber);
  }
}

void SwitchFiber(void** save, void* to) {
  Stacks& stacks = ThisThread();
  Stack& from = stacks.At(__builtin_frame_address(0));
  BeforeSwitch(from, stacks.At(to));
  jfm_fiber_switch(save, to);
  AfterSwitch(from);
}

}  // namespace jfm

#endif
