// A handler's library brings its own C++ runtime and unwinder (libstdc++ with libgcc,
// libc++ with libunwind, ours or another copy). To catch an exception, the code that the
// compiler generates for `catch` asks *our* unwinder about a context that *theirs* made,
// and crashes. So the handler is called by a small assembly function whose personality
// routine asks nothing of the unwinder: it stops the search, and when all frames below
// have been cleaned up, jumps out. The jump skips only the unwinder's own frames.
//
// Apple's platforms have one unwinder for all, and `catch` works.
#include "plugin/pjrt/custom_call/exception_barrier.h"

#include <exception>
#include <new>
#include <string>

#if defined(__linux__)
#include <cxxabi.h>
#include <setjmp.h>
#include <unwind.h>

#include <cstdint>
#include <cstdlib>
#endif

namespace jfm::pjrt {

#if defined(__linux__)
namespace {

// What one guarded call on this thread needs when an exception arrives.
struct Barrier {
  jmp_buf landing;
  bool out_of_memory = false;
  std::string text;
};
thread_local Barrier* innermost = nullptr;

// std::type_info of the Itanium C++ ABI, the same in both runtimes. `base` is a member of
// classes with a single base class only.
struct RawTypeInfo {
  void* const* vtable;
  const char* name;
  const RawTypeInfo* base;
};

std::string NameOf(const RawTypeInfo* type) {
  return type->name[0] == '*' ? type->name + 1 : type->name;
}

bool HasSingleBase(const RawTypeInfo* type) {
  const auto* kind = static_cast<const RawTypeInfo*>(type->vtable[-1]);
  return NameOf(kind) == "N10__cxxabiv120__si_class_type_infoE";
}

// Follows single inheritance, which keeps the object's address: all of the standard's
// exceptions, and what is commonly derived from them.
bool IsStdException(const RawTypeInfo* type) {
  while (NameOf(type) != "St9exception") {
    if (!HasSingleBase(type)) return false;
    type = type->base;
  }
  return true;
}

void Describe(const _Unwind_Exception* exception, Barrier& barrier) {
  barrier.text = "threw a C++ exception";
  // "GNUCC++" or "CLNGC++"; the last byte is 1 for a rethrown std::exception_ptr, whose
  // header is another one.
  const uint64_t runtime = exception->exception_class;
  if (runtime != 0x474E5543432B2B00 && runtime != 0x434C4E47432B2B00) return;
  // The ABI's header ends with the _Unwind_Exception, ten words after the type's address,
  // and the thrown object follows.
  const RawTypeInfo* type = reinterpret_cast<const RawTypeInfo* const*>(exception)[-10];
  const std::string name = NameOf(type);
  int status = 0;
  char* readable = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  barrier.text += std::string(" of type ") + (readable != nullptr ? readable : name.c_str());
  std::free(readable);
  barrier.out_of_memory = name == "St9bad_alloc";
  if (!IsStdException(type)) return;
  const void* object = exception + 1;
  const auto vtable = *static_cast<void* const* const*>(object);
  // After the two destructors comes what().
  const auto what = reinterpret_cast<const char* (*)(const void*)>(vtable[2]);
  barrier.text += std::string(": ") + what(object);
}

}  // namespace

extern "C" __attribute__((visibility("hidden"))) int jfm_barrier_personality(
    int version, int actions, uint64_t, _Unwind_Exception* exception, void*) {
  if (version != 1) return _URC_FATAL_PHASE1_ERROR;
  // The end of the thread (pthread_exit, pthread_cancel) passes.
  if ((actions & _UA_FORCE_UNWIND) != 0) return _URC_CONTINUE_UNWIND;
  if ((actions & _UA_SEARCH_PHASE) != 0) return _URC_HANDLER_FOUND;
  if ((actions & _UA_HANDLER_FRAME) == 0) return _URC_CONTINUE_UNWIND;
  Barrier& barrier = *innermost;
  try {
    Describe(exception, barrier);
  } catch (const std::exception&) {  // out of memory: without a text
  }
  if (exception->exception_cleanup != nullptr) {
    exception->exception_cleanup(_URC_FOREIGN_EXCEPTION_CAUGHT, exception);
  }
  longjmp(barrier.landing, 1);
}

extern "C" __attribute__((visibility("hidden"))) void* jfm_barrier_call(void* (*function)(void*),
                                                                        void* argument);

// 0x1b: the personality's address is given relative to this place, in four bytes.
#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.globl jfm_barrier_call
.hidden jfm_barrier_call
.type jfm_barrier_call, @function
jfm_barrier_call:
.cfi_startproc
.cfi_personality 0x1b, jfm_barrier_personality
  subq $8, %rsp
.cfi_def_cfa_offset 16
  movq %rdi, %rax
  movq %rsi, %rdi
  callq *%rax
  addq $8, %rsp
.cfi_def_cfa_offset 8
  retq
.cfi_endproc
.size jfm_barrier_call, .-jfm_barrier_call
)");
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
.globl jfm_barrier_call
.hidden jfm_barrier_call
.type jfm_barrier_call, %function
jfm_barrier_call:
.cfi_startproc
.cfi_personality 0x1b, jfm_barrier_personality
  stp x29, x30, [sp, #-16]!
.cfi_def_cfa_offset 16
.cfi_offset x29, -16
.cfi_offset x30, -8
  mov x29, sp
  mov x8, x0
  mov x0, x1
  blr x8
  ldp x29, x30, [sp], #16
.cfi_def_cfa_offset 0
.cfi_restore x29
.cfi_restore x30
  ret
.cfi_endproc
.size jfm_barrier_call, .-jfm_barrier_call
)");
#else
#error "exception barrier: no call code for this CPU"
#endif

Status CallWithBarrier(void* (*function)(void*), void* argument, void** result) {
  Barrier barrier;
  Barrier* const outer = innermost;
  innermost = &barrier;
  // _setjmp: leaves the signal mask alone, which would cost a system call.
  if (_setjmp(barrier.landing) == 0) {
    *result = jfm_barrier_call(function, argument);
    innermost = outer;
    return {};
  }
  innermost = outer;
  return {barrier.out_of_memory ? Code::kResourceExhausted : Code::kInternal,
          std::move(barrier.text)};
}

#else

Status CallWithBarrier(void* (*function)(void*), void* argument, void** result) {
  const std::string text = "threw a C++ exception";
  try {
    *result = function(argument);
    return {};
  } catch (const std::bad_alloc& exception) {
    return {Code::kResourceExhausted, text + ": " + exception.what()};
  } catch (const std::exception& exception) {
    return Internal(text + ": " + exception.what());
  } catch (...) {
    return Internal(text);
  }
}

#endif

}  // namespace jfm::pjrt
