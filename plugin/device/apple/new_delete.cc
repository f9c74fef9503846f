// The library's own operators new and delete, over malloc: on macOS libc++ is linked in
// statically, and its operators would be exported as weak symbols that dyld joins with those of
// every other library of the process. The build makes them hidden
// (-fvisibility-global-new-delete, plugin/build.py). Empty on other systems.
#ifdef __APPLE__

#include <cstdlib>
#include <new>

namespace {

void* AllocateOrNull(std::size_t size) noexcept { return std::malloc(size > 0 ? size : 1); }

void* AllocateOrNull(std::size_t size, std::align_val_t alignment) noexcept {
  // posix_memalign wants a power of two that is a multiple of a pointer's size.
  const std::size_t at_least = static_cast<std::size_t>(alignment);
  void* memory = nullptr;
  const int error = ::posix_memalign(
      &memory, at_least > sizeof(void*) ? at_least : sizeof(void*), size > 0 ? size : 1);
  return error == 0 ? memory : nullptr;
}

// No new_handler is asked: nothing in this library sets one.
void* OrThrow(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

using std::align_val_t;
using std::nothrow_t;
using std::size_t;

void* operator new(size_t size) { return OrThrow(AllocateOrNull(size)); }
void* operator new[](size_t size) { return OrThrow(AllocateOrNull(size)); }
void* operator new(size_t size, align_val_t alignment) {
  return OrThrow(AllocateOrNull(size, alignment));
}
void* operator new[](size_t size, align_val_t alignment) {
  return OrThrow(AllocateOrNull(size, alignment));
}
void* operator new(size_t size, const nothrow_t&) noexcept { return AllocateOrNull(size); }
void* operator new[](size_t size, const nothrow_t&) noexcept { return AllocateOrNull(size); }
void* operator new(size_t size, align_val_t alignment, const nothrow_t&) noexcept {
  return AllocateOrNull(size, alignment);
}
void* operator new[](size_t size, align_val_t alignment, const nothrow_t&) noexcept {
  return AllocateOrNull(size, alignment);
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t, align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, const nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, const nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory, align_val_t, const nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, align_val_t, const nothrow_t&) noexcept {
  std::free(memory);
}

#endif  // __APPLE__
