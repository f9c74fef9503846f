#include "plugin/device/software/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>

// The System V and AAPCS64 callee-saved registers. The floating-point control words are
// the same in every lane and stay.
#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.globl jfm_fiber_switch
.hidden jfm_fiber_switch
.type jfm_fiber_switch, @function
jfm_fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  retq
.size jfm_fiber_switch, .-jfm_fiber_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
.globl jfm_fiber_switch
.hidden jfm_fiber_switch
.type jfm_fiber_switch, %function
jfm_fiber_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size jfm_fiber_switch, .-jfm_fiber_switch
)");
#else
#error "fibers: no switch code for this CPU"
#endif

namespace jfm {
namespace {

constexpr size_t kPage = 4096;
// No guard pages: with many threads they would exceed Linux's number of mappings. Instead
// the front end compiles kernels, which do not recurse, with a limit on their frames.
constexpr size_t kStack = 64 * 1024;
// Stacks of one power-of-two size would put the frames of all lanes into the same sets of
// the cache: each starts 17 cache lines further down than the one before.
constexpr size_t kStagger = 17 * 64;

}  // namespace

FiberStacks::FiberStacks(size_t count) : count_(count) {
  void* memory = mmap(nullptr, count * kStack, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return;
  memory_ = static_cast<char*>(memory);
}

FiberStacks::~FiberStacks() {
  if (memory_ == nullptr) return;
#ifdef JFM_SANITIZED_FIBERS
  ForgetFibers(memory_, count_ * kStack);
#endif
  munmap(memory_, count_ * kStack);
}

void* FiberStacks::Prepare(size_t index, void (*entry)()) const {
#ifdef JFM_SANITIZED_FIBERS
  entry = AnnounceFiber(memory_ + index * kStack, kStack, entry);
#endif
  char* top = memory_ + (index + 1) * kStack - index * kStagger % kPage;
#if defined(__x86_64__)
  // From the top: an empty slot that aligns, the return address of `entry` (none), the
  // address that the switch returns to, six registers.
  uint64_t* sp = reinterpret_cast<uint64_t*>(top) - 2;
  *--sp = 0;
  *--sp = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < 6; ++i) *--sp = 0;
#else
  uint64_t* sp = reinterpret_cast<uint64_t*>(top) - 20;
  std::memset(sp, 0, 160);
  sp[11] = reinterpret_cast<uint64_t>(entry);  // x30
#endif
  return sp;
}

bool FiberStacks::Contains(const void* address) const {
  const char* p = static_cast<const char*>(address);
  return p >= memory_ && p < memory_ + count_ * kStack;
}

}  // namespace jfm
