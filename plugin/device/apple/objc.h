// The Objective-C runtime without Apple's SDK: its types, messages with exact C types, owned
// references, autorelease pools and blocks. Everything is found at run time in the system's
// libraries, so nothing of Apple's is needed to build. Knows nothing of Metal but its loading.
#pragma once

#include <utility>

#include "plugin/status.h"

namespace jfm::apple {

// As the arm64 ABI of macOS has them. SEL is a name that the runtime made unique.
struct Object;
using id = Object*;
using Class = Object*;
using SEL = const struct SelectorName*;
using BOOL = bool;
using NSInteger = long;             // NOLINT: Apple's definition
using NSUInteger = unsigned long;   // NOLINT
using uint64 = unsigned long long;  // NOLINT: uint64_t on macOS, and encoded differently

struct MTLSize {
  NSUInteger width, height, depth;
};

// What a block literal is in memory (clang's "Block Implementation Specification"). Whoever
// keeps a block copies it; with nothing but a raw pointer captured, a copy of the bytes is a
// copy of the block, and no helper functions are needed.
struct BlockDescriptor {
  unsigned long reserved, size;  // NOLINT
};
struct Block {
  void* isa;
  int flags, reserved;
  void (*invoke)();
  const BlockDescriptor* descriptor;
  void* captured;
};
// To be passed on before it goes out of scope. `invoke` has the block itself as its first
// argument; what is captured must outlive every copy's use.
Block MakeBlock(void (*invoke)(), void* captured);

// The functions of the runtime that are called by name. Set by OpenRuntime().
struct Runtime {
  Class (*get_class)(const char* name);
  SEL (*register_selector)(const char* name);
  void (*msg_send)();  // never called as declared: every message casts it to its own type
  void* (*push_pool)();
  void (*pop_pool)(void* pool);
  id (*create_system_default_device)();
  void* stack_block_class;
  // IOKit, for the number of cores alone: it need not be there. What io_create_property
  // gives is the caller's.
  bool has_iokit;
  id (*io_service_matching)(const char* name);
  unsigned int (*io_get_matching_service)(unsigned int main_port, id matching);
  id (*io_create_property)(unsigned int entry, id key, void* allocator, unsigned int options);
  int (*io_object_release)(unsigned int object);
};
extern Runtime runtime;

// Loads the libraries, finds the functions, the classes and the selectors; the first call
// does it, the others have its result. Nothing else here may be used before it succeeded.
const Status& OpenRuntime();

// A message of one selector, called like a function: send::length(buffer). noexcept: an
// Objective-C exception (an answer to misuse) must end the process here, and not unwind
// through frames whose C++ runtime is another one than Apple's.
template <class Signature>
class Message;
template <class R, class... Args>
class Message<R(Args...)> {
 public:
  explicit constexpr Message(const char* name) : name_(name) {}
  void Register() { selector_ = runtime.register_selector(name_); }
  SEL selector() const { return selector_; }
  R operator()(id receiver, Args... args) const noexcept {
    return reinterpret_cast<R (*)(id, SEL, Args...)>(runtime.msg_send)(receiver, selector_,
                                                                       args...);
  }

 private:
  const char* name_;
  SEL selector_ = nullptr;
};

// Objects that are autoreleased while it lives are released when it ends. Every function
// that others call has one if it sends messages: their threads need not have any.
class Pool {
 public:
  Pool() : pool_(runtime.push_pool()) {}
  ~Pool() { runtime.pop_pool(pool_); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

 private:
  void* pool_;
};

// One owned reference to an object, or to none.
class Ref {
 public:
  Ref() = default;
  // What new… and alloc/init methods give: already retained for the caller.
  static Ref Adopt(id object) { return Ref(object); }
  // What all others give: borrowed, perhaps only until the pool ends.
  static Ref Retain(id object);
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref();
  id get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit Ref(id object) : object_(object) {}
  id object_ = nullptr;
};

Ref New(Class cls);  // [[cls alloc] init]

// Strings and errors; autoreleased, so the caller has a Pool.
id String(const std::string& text);
std::string Text(id string);      // empty for nil
std::string ErrorText(id error);  // an NSError's description; something readable for nil

}  // namespace jfm::apple
