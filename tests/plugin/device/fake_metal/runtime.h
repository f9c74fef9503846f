// Inside the fake Objective-C runtime: objects, classes, references, faults. The classes
// themselves are in foundation.cc, device.cc, library.cc and commands.cc.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#define FAKE_EXPORT __attribute__((visibility("default")))

namespace fake {

// ---- Faults --------------------------------------------------------------------------

// A rule of Objective-C or Metal is broken. Returns only if faults do not end the process.
void Fault(const std::string& text);
// The same without "Metal API misuse: " before it.
void FaultAsIs(const std::string& text);

// ---- The fake's own bookkeeping ------------------------------------------------------

// Holds the one lock over tables, counts and settings. ThreadSanitizer does not see it:
// otherwise every call of a method would order the threads of the layer under test, and
// hide its races.
class Bookkeeping {
 public:
  Bookkeeping();
  ~Bookkeeping();
  Bookkeeping(const Bookkeeping&) = delete;
  Bookkeeping& operator=(const Bookkeeping&) = delete;
};

// ---- Selectors -----------------------------------------------------------------------

struct Failure {
  int skip;
  int count;
  int mode;
  std::string message;
};

// What a SEL points to.
struct Selector {
  std::string name;
  int64_t calls = 0;
  int64_t nil_calls = 0;
  std::deque<Failure> failures;
};

Selector* SelectorNamed(const std::string& name);

// ---- Objects -------------------------------------------------------------------------

struct Class;

struct Object {
  virtual ~Object() = default;
  // The memory of a dead object is never used again, so that a message to it is known.
  static void* operator new(size_t size);
  static void operator delete(void*) {}

  const Class* isa = nullptr;
  bool initialized = true;  // false between alloc and init
  // Low half: references that clients hold. High half: those of other objects of the fake.
  std::atomic<uint64_t> references{1};
};

constexpr uint64_t kExternal = 1;
constexpr uint64_t kInternal = uint64_t{1} << 32;
inline uint64_t ExternalReferences(const Object& object) {
  return object.references.load() & (kInternal - 1);
}

using Method = void (*)();

struct Class : Object {
  std::string name;
  const Class* parent = nullptr;
  bool is_counted = true;  // among the live objects
  Object* (*allocate)() = nullptr;
  std::unordered_map<const Selector*, Method> methods;
  std::unordered_map<const Selector*, Method> class_methods;

  // Methods are functions of (self, Selector*, arguments...); + makes one of a lambda.
  template <class Function>
  Class& On(const char* selector, Function* function) {
    methods[SelectorNamed(selector)] = reinterpret_cast<Method>(function);
    return *this;
  }
  template <class Function>
  Class& OnClass(const char* selector, Function* function) {
    class_methods[SelectorNamed(selector)] = reinterpret_cast<Method>(function);
    return *this;
  }
  // For classes that are allocated directly.
  template <class T>
  Class& Allocates();

  Method Find(const Selector* selector, bool of_class) const;
  bool IsA(const Class& other) const;
};

// A new class below NSObject; `define` runs once, when it is made.
Class* NewClass(const char* name, void (*define)(Class&));
// Makes a class known to objc_getClass; the others stand for protocols of Metal.
struct PublicClass {
  explicit PublicClass(Class& (*the_class)());
};

// Notes that the object lives. It has one reference, the caller's.
void Enlist(Object* object, const Class& isa);
bool IsAlive(const void* object);
// The class's name, or what is known of an object that is none (any more).
std::string NameOf(const void* object);

// T is a struct derived from Object with a static function TheClass(), which this defines.
#define FAKE_CLASS(type, name, define)                 \
  Class& type::TheClass() {                            \
    static Class& the_class = *NewClass(name, define); \
    return the_class;                                  \
  }

template <class T, class... Arguments>
T* Make(Arguments&&... arguments) {
  T* object = new T(std::forward<Arguments>(arguments)...);
  Enlist(object, T::TheClass());
  return object;
}

template <class T>
Class& Class::Allocates() {
  allocate = +[]() -> Object* {
    T* object = Make<T>();
    object->initialized = false;
    return object;
  };
  return *this;
}

void Retain(Object* object, uint64_t kind);
void Release(Object* object, uint64_t kind);
// Hands one external reference to this thread's innermost pool.
void Autorelease(Object* object);

template <class T>
T* Autoreleased(T* object) {
  Autorelease(object);
  return object;
}
// For getters: what they return lives at least as long as the pool. Null stays null.
template <class T>
T* Lent(T* object) {
  if (object == nullptr) return nullptr;
  Retain(object, kExternal);
  return Autoreleased(object);
}

// A reference that one object of the fake holds to another.
template <class T>
class Ref {
 public:
  Ref() = default;
  explicit Ref(T* object) : object_(object) {
    if (object_ != nullptr) Retain(object_, kInternal);
  }
  Ref(const Ref& other) : Ref(other.object_) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() {
    if (object_ != nullptr) Release(object_, kInternal);
  }
  // Takes over the caller's only reference.
  static Ref Adopt(T* object) {
    Ref ref(object);
    Release(object, kExternal);
    return ref;
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  T* object_ = nullptr;
};

// "-[MTLDevice newBufferWithLength:options:]"
std::string MethodName(const Object* self, const Selector* selector);

// The object as a T; null, and a fault, if it is nil or something else.
template <class T>
T* Argument(const Object* self, const Selector* selector, const char* what, Object* object) {
  const Class& expected = T::TheClass();
  if (IsAlive(object) && object->isa->IsA(expected)) return static_cast<T*>(object);
  Fault(MethodName(self, selector) + ": " + what + " must be a " + expected.name + ", but got " +
        NameOf(object) + ".");
  return nullptr;
}
// The same, but nil is allowed: `*ok` tells it from a fault.
template <class T>
T* OptionalArgument(const Object* self, const Selector* selector, const char* what, Object* object,
                    bool* ok) {
  *ok = true;
  if (object == nullptr) return nullptr;
  T* result = Argument<T>(self, selector, what, object);
  *ok = result != nullptr;
  return result;
}

// ---- Failures that a test asked for --------------------------------------------------

// The mode of the failure under way in this call, if it is one that the method itself has to
// carry out; otherwise -1.
struct RunFailure {
  int mode = -1;
  std::string message;
};
RunFailure TakeRunFailure();

// ---- Blocks --------------------------------------------------------------------------

struct BlockLiteral;
// _Block_copy and _Block_release, with checks. A copy counts as a live object. Null, and a
// fault, if it is not a block.
BlockLiteral* CopyBlock(const void* block, const std::string& where);
void ReleaseBlock(BlockLiteral* block);
Method BlockFunction(const BlockLiteral* block);

// ---- Settings ------------------------------------------------------------------------

int64_t Fact(const char* name);
std::string FactText(const char* name);

}  // namespace fake
