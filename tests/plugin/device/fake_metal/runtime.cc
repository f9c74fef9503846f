// The fake Objective-C runtime: what libobjc exports, and NSObject.
#include "tests/plugin/device/fake_metal/runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <unordered_set>

#include "tests/plugin/device/fake_metal/fake_metal.h"
#include "tests/plugin/device/fake_metal/foundation.h"

#if defined(__SANITIZE_THREAD__)
#define FAKE_UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define FAKE_UNDER_TSAN 1
#endif
#endif

#ifdef FAKE_UNDER_TSAN
extern "C" {
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace fake {

// ---- Tables --------------------------------------------------------------------------

namespace {

// All of it is protected by Bookkeeping, and never destroyed.
struct Tables {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<Selector>> selectors;
  std::unordered_set<const void*> known_selectors;
  std::unordered_set<const void*> classes;
  std::unordered_set<const Object*> live;
  std::unordered_map<const void*, const Class*> dead;
  std::unordered_set<const void*> blocks;
  std::string faults;
  bool abort_on_fault = true;
};

Tables& tables() {
  static Tables& all = *new Tables;
  return all;
}

std::vector<Class& (*)()>& PublicClasses() {
  static auto& all = *new std::vector<Class& (*)()>;
  return all;
}

thread_local RunFailure run_failure;

}  // namespace

Bookkeeping::Bookkeeping() {
#ifdef FAKE_UNDER_TSAN
  AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
  tables().mutex.lock();
}

Bookkeeping::~Bookkeeping() {
  tables().mutex.unlock();
#ifdef FAKE_UNDER_TSAN
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
#endif
}

void FaultAsIs(const std::string& text) {
  Bookkeeping lock;
  tables().faults += text + "\n";
  if (!tables().abort_on_fault) return;
  std::fprintf(stderr, "%s\n", text.c_str());
  std::fflush(stderr);
  std::abort();
}

void Fault(const std::string& text) { FaultAsIs("Metal API misuse: " + text); }

Selector* SelectorNamed(const std::string& name) {
  Bookkeeping lock;
  std::unique_ptr<Selector>& selector = tables().selectors[name];
  if (selector == nullptr) {
    selector = std::make_unique<Selector>();
    selector->name = name;
    tables().known_selectors.insert(selector.get());
  }
  return selector.get();
}

// ---- Classes and objects -------------------------------------------------------------

void* Object::operator new(size_t size) {
  void* memory = std::malloc(size);
  if (memory == nullptr) std::abort();
  return memory;
}

Method Class::Find(const Selector* selector, bool of_class) const {
  for (const Class* c = this; c != nullptr; c = c->parent) {
    const auto& table = of_class ? c->class_methods : c->methods;
    const auto found = table.find(selector);
    if (found != table.end()) return found->second;
  }
  return nullptr;
}

bool Class::IsA(const Class& other) const {
  for (const Class* c = this; c != nullptr; c = c->parent) {
    if (c == &other) return true;
  }
  return false;
}

PublicClass::PublicClass(Class& (*the_class)()) { PublicClasses().push_back(the_class); }

void Enlist(Object* object, const Class& isa) {
  object->isa = &isa;
  Bookkeeping lock;
  tables().live.insert(object);
}

bool IsAlive(const void* object) {
  Bookkeeping lock;
  return tables().live.count(static_cast<const Object*>(object)) != 0;
}

std::string NameOf(const void* object) {
  if (object == nullptr) return "nil";
  Bookkeeping lock;
  if (tables().classes.count(object) != 0) {
    return "the class " + static_cast<const Class*>(object)->name;
  }
  if (tables().live.count(static_cast<const Object*>(object)) != 0) {
    return "a " + static_cast<const Object*>(object)->isa->name;
  }
  const auto dead = tables().dead.find(object);
  if (dead != tables().dead.end()) return "a deallocated " + dead->second->name;
  return "something that is not an object";
}

std::string MethodName(const Object* self, const Selector* selector) {
  bool is_class;
  {
    Bookkeeping lock;
    is_class = tables().classes.count(self) != 0;
  }
  const std::string name = is_class ? static_cast<const Class*>(self)->name : self->isa->name;
  return (is_class ? "+[" : "-[") + name + " " + selector->name + "]";
}

void Retain(Object* object, uint64_t kind) { object->references.fetch_add(kind); }

void Release(Object* object, uint64_t kind) {
  uint64_t old = object->references.load();
  do {
    const uint64_t of_this_kind = kind == kExternal ? old & (kInternal - 1) : old / kInternal;
    if (of_this_kind == 0) {
      return Fault("a " + object->isa->name +
                   " is released more often than it was retained: the reference that goes "
                   "belongs to another object.");
    }
  } while (!object->references.compare_exchange_weak(old, old - kind));
  if (old != kind) return;
  {
    Bookkeeping lock;
    tables().live.erase(object);
    tables().dead[object] = object->isa;
  }
  delete object;
}

RunFailure TakeRunFailure() { return std::exchange(run_failure, RunFailure()); }

// ---- Autorelease pools ---------------------------------------------------------------

namespace {

class PoolStack {
 public:
  ~PoolStack() {
    if (IsEmpty()) return;
    Fault("a thread ends with " + std::to_string(pools_.size()) + " autorelease pools open.");
    while (!pools_.empty()) Drain();
  }

  void* Push() {
    static std::atomic<uintptr_t> last{0};
    pools_.push_back({++last, objects_.size()});
    return reinterpret_cast<void*>(pools_.back().token);
  }

  void Pop(void* token) {
    if (pools_.empty() || reinterpret_cast<void*>(pools_.back().token) != token) {
      return Fault(
          "objc_autoreleasePoolPop: not the innermost pool of this thread, or of another thread.");
    }
    Drain();
  }

  bool IsEmpty() const { return pools_.empty(); }

  void Add(Object* object) {
    if (IsEmpty()) {
      return Fault("leaked: no pool: a " + object->isa->name +
                   " is autoreleased on a thread without an autorelease pool.");
    }
    objects_.push_back(object);
  }

 private:
  struct Pool {
    uintptr_t token;
    size_t first;
  };

  void Drain() {
    const size_t first = pools_.back().first;
    while (objects_.size() > first) {
      Object* object = objects_.back();
      objects_.pop_back();
      if (IsAlive(object)) {
        Release(object, kExternal);
      } else {
        Fault("an autorelease pool releases " + NameOf(object) +
              ": it was released more often than it was retained.");
      }
    }
    pools_.pop_back();
  }

  std::vector<Pool> pools_;
  std::vector<Object*> objects_;
};

PoolStack& Pools() {
  static thread_local PoolStack pools;
  return pools;
}

}  // namespace

void Autorelease(Object* object) { Pools().Add(object); }

// ---- Blocks --------------------------------------------------------------------------
// The layout: https://clang.llvm.org/docs/Block-ABI-Apple.html

extern "C" {
// Longer than a pointer, as the real ones: they are class objects.
FAKE_EXPORT void* _NSConcreteStackBlock[32];
FAKE_EXPORT void* _NSConcreteGlobalBlock[32];
FAKE_EXPORT void* _NSConcreteMallocBlock[32];
}

struct BlockDescriptor {
  unsigned long reserved;
  unsigned long size;
  void (*copy)(void* to, const void* from);  // these two only with kHasCopyDispose
  void (*dispose)(const void* block);
};

struct BlockLiteral {
  void* isa;
  int flags;
  int reserved;
  Method invoke;
  const BlockDescriptor* descriptor;
};

constexpr int kHasCopyDispose = 1 << 25;
constexpr int kIsGlobal = 1 << 28;

BlockLiteral* CopyBlock(const void* block, const std::string& where) {
  const auto* literal = static_cast<const BlockLiteral*>(block);
  const char* wrong = nullptr;
  if (literal == nullptr) {
    wrong = "the block is nil";
  } else if (literal->isa != _NSConcreteStackBlock && literal->isa != _NSConcreteGlobalBlock) {
    wrong =
        "the argument is not a block: its isa is none of _NSConcreteStackBlock and "
        "_NSConcreteGlobalBlock";
  } else if (literal->invoke == nullptr || literal->descriptor == nullptr) {
    wrong = "the block has no function or no descriptor";
  } else if (literal->descriptor->size < sizeof(BlockLiteral) || literal->descriptor->size > 4096) {
    wrong = "the block's descriptor has an impossible size";
  } else if ((literal->isa == _NSConcreteGlobalBlock) != ((literal->flags & kIsGlobal) != 0)) {
    wrong = "the block's flags do not fit its isa";
  }
  if (wrong != nullptr) {
    Fault(where + ": " + wrong + ".");
    return nullptr;
  }
  void* copy = std::malloc(literal->descriptor->size);
  std::memcpy(copy, literal, literal->descriptor->size);
  auto* result = static_cast<BlockLiteral*>(copy);
  result->isa = _NSConcreteMallocBlock;
  if ((literal->flags & kHasCopyDispose) != 0) literal->descriptor->copy(copy, literal);
  Bookkeeping lock;
  tables().blocks.insert(copy);
  return result;
}

void ReleaseBlock(BlockLiteral* block) {
  if (block == nullptr) return;
  if ((block->flags & kHasCopyDispose) != 0) block->descriptor->dispose(block);
  {
    Bookkeeping lock;
    tables().blocks.erase(block);
  }
  std::free(block);
}

Method BlockFunction(const BlockLiteral* block) { return block->invoke; }

// ---- NSObject ------------------------------------------------------------------------

namespace {

struct PlainObject : Object {
  static Class& TheClass();
};

Object* Self(Object* self, Selector*) { return self; }

void DefineObject(Class& c) {
  c.Allocates<PlainObject>();
  c.On(
      "retain", +[](Object* self, Selector*) {
        Retain(self, kExternal);
        return self;
      });
  c.On("release", +[](Object* self, Selector*) { Release(self, kExternal); });
  c.On("autorelease", +[](Object* self, Selector*) { return Autoreleased(self); });
  c.On(
      "retainCount", +[](Object* self, Selector*) {
        const uint64_t both = self->references.load();
        return both % kInternal + both / kInternal;
      });
  c.On(
      "init", +[](Object* self, Selector* selector) {
        if (self->initialized) Fault(MethodName(self, selector) + ": it was initialised before.");
        self->initialized = true;
        return self;
      });
  c.On("self", &Self);
  c.On("class", +[](Object* self, Selector*) { return self->isa; });
  c.On(
      "isKindOfClass:", +[](Object* self, Selector*, const Class* other) {
        return other != nullptr && self->isa->IsA(*other);
      });
  c.On(
      "respondsToSelector:", +[](Object* self, Selector*, const Selector* selector) {
        return self->isa->Find(selector, false) != nullptr;
      });
  const auto allocate = +[](Class* self, Selector* selector) -> Object* {
    if (self->allocate == nullptr) {
      Fault(MethodName(self, selector) + ": this class makes no objects by itself.");
      return nullptr;
    }
    return self->allocate();
  };
  c.OnClass("alloc", allocate);
  c.OnClass(
      "new", +[](Class* self, Selector* selector) -> Object* {
        if (self->allocate == nullptr) {
          Fault(MethodName(self, selector) + ": this class makes no objects by itself.");
          return nullptr;
        }
        // As [[self alloc] init]: the class may have an init of its own.
        Object* object = self->allocate();
        static Selector* const init = SelectorNamed("init");
        const Method method = object->isa->Find(init, false);
        return reinterpret_cast<Object* (*)(Object*, Selector*)>(method)(object, init);
      });
  c.OnClass("class", &Self);
  c.OnClass("self", &Self);
  c.OnClass("retain", &Self);
  c.OnClass("autorelease", &Self);
  c.OnClass("release", +[](Object*, Selector*) {});
  c.OnClass(
      "respondsToSelector:", +[](Class* self, Selector*, const Selector* selector) {
        return self->Find(selector, true) != nullptr;
      });
  c.OnClass(
      "instancesRespondToSelector:", +[](Class* self, Selector*, const Selector* selector) {
        return self->Find(selector, false) != nullptr;
      });
}

const PublicClass object_class(&PlainObject::TheClass);

}  // namespace

Class* NewClass(const char* name, void (*define)(Class&)) {
  auto* c = new Class;
  c->name = name;
  if (define != &DefineObject) c->parent = &PlainObject::TheClass();
  define(*c);
  Bookkeeping lock;
  tables().classes.insert(c);
  return c;
}

Class& PlainObject::TheClass() {
  static Class& c = *NewClass("NSObject", &DefineObject);
  return c;
}

// ---- Sending -------------------------------------------------------------------------

namespace {

// Methods that an object understands between alloc and init.
bool IsForFreshObjects(const std::string& name) {
  static const std::unordered_set<std::string>& others = *new std::unordered_set<std::string>{
      "retain", "release", "autorelease", "retainCount", "self", "class", "respondsToSelector:"};
  return name.compare(0, 4, "init") == 0 || others.count(name) != 0;
}

// Metal's methods autorelease objects of their own; these do not.
bool NeedsPool(const Class& c, const std::string& selector) {
  static const std::unordered_set<std::string>& others = *new std::unordered_set<std::string>{
      "retain", "release", "retainCount", "class", "isKindOfClass:", "respondsToSelector:"};
  return c.name.compare(0, 3, "MTL") == 0 && others.count(selector) == 0;
}

// Takes the failure that a test asked for, if it is this call's turn.
bool TakeFailure(Selector* selector, Failure* failure) {
  if (selector->failures.empty()) return false;
  Failure& first = selector->failures.front();
  if (first.skip > 0) {
    --first.skip;
    return false;
  }
  *failure = first;
  if (--first.count <= 0) selector->failures.pop_front();
  return true;
}

// The NSError** of a method that has one is its last argument.
Object** ErrorArgument(const std::string& name, void** arguments) {
  const std::string last = "error:";
  if (name.size() < last.size() ||
      name.compare(name.size() - last.size(), last.size(), last) != 0) {
    return nullptr;
  }
  size_t colons = 0;
  for (const char c : name) colons += c == ':';
  return static_cast<Object**>(arguments[1 + colons]);
}

}  // namespace

extern "C" {

void fake_metal_zero();  // returns nil, 0 and 0.0

// For objc_msgSend in message_send.cc: `arguments` are the integer registers in order, self
// and the selector first.
__attribute__((visibility("hidden"), used)) Method fake_metal_find_method(Object* self,
                                                                          Selector* selector,
                                                                          void** arguments) {
  enum class Kind { kObject, kClass, kNil, kWrong } kind = Kind::kWrong;
  bool is_selector;
  bool fails = false;
  Failure failure;
  {
    Bookkeeping lock;
    is_selector = tables().known_selectors.count(selector) != 0;
    if (self == nullptr) {
      kind = Kind::kNil;
    } else if (tables().live.count(self) != 0) {
      kind = Kind::kObject;
    } else if (tables().classes.count(self) != 0) {
      kind = Kind::kClass;
    }
    if (is_selector && kind != Kind::kWrong) {
      ++(kind == Kind::kNil ? selector->nil_calls : selector->calls);
      if (kind != Kind::kNil) fails = TakeFailure(selector, &failure);
    }
  }
  if (!is_selector) {
    FaultAsIs("unrecognized selector: objc_msgSend got one that sel_registerName never gave.");
    return &fake_metal_zero;
  }
  if (kind == Kind::kNil) return &fake_metal_zero;
  if (kind == Kind::kWrong) {
    Fault("message " + selector->name + " sent to " + NameOf(self) + ".");
    return &fake_metal_zero;
  }
  const bool of_class = kind == Kind::kClass;
  const Class* c = of_class ? static_cast<const Class*>(self) : self->isa;
  const Method method = c->Find(selector, of_class);
  if (method == nullptr) {
    FaultAsIs("unrecognized selector " + MethodName(self, selector));
    return &fake_metal_zero;
  }
  if (!of_class && !self->initialized && !IsForFreshObjects(selector->name)) {
    Fault(MethodName(self, selector) + ": the object was allocated, but not initialised.");
    return &fake_metal_zero;
  }
  if (Pools().IsEmpty() && NeedsPool(*c, selector->name)) {
    Fault(MethodName(self, selector) + " on a thread without an autorelease pool.");
    return &fake_metal_zero;
  }
  if (!fails) return method;
  if (failure.mode >= FAKE_METAL_RUN_ERROR && failure.mode != FAKE_METAL_WARNING) {
    run_failure = {failure.mode, failure.message};
    return method;
  }
  if (failure.mode != FAKE_METAL_NIL) {
    if (Object** error = ErrorArgument(selector->name, arguments)) {
      *error = NewError("FakeErrorDomain", 3, failure.message);
    }
  }
  return failure.mode == FAKE_METAL_WARNING ? method : &fake_metal_zero;
}

FAKE_EXPORT Object* objc_getClass(const char* name) {
  for (Class& (*the_class)() : PublicClasses()) {
    Class& c = the_class();
    if (name != nullptr && c.name == name) return &c;
  }
  return nullptr;
}

FAKE_EXPORT Selector* sel_registerName(const char* name) {
  if (name == nullptr) {
    Fault("sel_registerName: the name is NULL.");
    return nullptr;
  }
  return SelectorNamed(name);
}

FAKE_EXPORT void* objc_autoreleasePoolPush() { return Pools().Push(); }
FAKE_EXPORT void objc_autoreleasePoolPop(void* token) { Pools().Pop(token); }

FAKE_EXPORT void* objc_retain(Object* object) {
  if (object == nullptr) return nullptr;
  if (!IsAlive(object)) {
    Fault("objc_retain of " + NameOf(object) + ".");
    return object;
  }
  Retain(object, kExternal);
  return object;
}

FAKE_EXPORT void objc_release(Object* object) {
  if (object == nullptr) return;
  if (!IsAlive(object)) return Fault("objc_release of " + NameOf(object) + ".");
  Release(object, kExternal);
}

// ---- fake_metal.h: objects, calls, faults --------------------------------------------

namespace {
// Text that a caller in C may read until its next call.
const char* Keep(std::string text) {
  static thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}
}  // namespace

FAKE_EXPORT void fake_metal_retain(void* object) { objc_retain(static_cast<Object*>(object)); }
FAKE_EXPORT void fake_metal_release(void* object) { objc_release(static_cast<Object*>(object)); }

FAKE_EXPORT int64_t fake_metal_references(void* object) {
  if (!IsAlive(object)) return -1;
  return static_cast<int64_t>(ExternalReferences(*static_cast<Object*>(object)));
}

FAKE_EXPORT int64_t fake_metal_live_objects() {
  Bookkeeping lock;
  auto count = static_cast<int64_t>(tables().blocks.size());
  for (const Object* object : tables().live) count += object->isa->is_counted;
  return count;
}

FAKE_EXPORT const char* fake_metal_live_text() {
  std::map<std::string, int> counts;
  {
    Bookkeeping lock;
    for (const Object* object : tables().live) {
      if (object->isa->is_counted) ++counts[object->isa->name];
    }
    if (!tables().blocks.empty()) counts["block"] = static_cast<int>(tables().blocks.size());
  }
  std::string text;
  for (const auto& [name, count] : counts) {
    text += (text.empty() ? "" : ", ") + name + " x " + std::to_string(count);
  }
  return Keep(text);
}

FAKE_EXPORT int64_t fake_metal_calls(const char* selector) {
  const Selector* s = SelectorNamed(selector);
  Bookkeeping lock;
  return s->calls;
}

FAKE_EXPORT int64_t fake_metal_nil_calls(const char* selector) {
  const Selector* s = SelectorNamed(selector);
  Bookkeeping lock;
  return s->nil_calls;
}

FAKE_EXPORT void fake_metal_fail(const char* selector, int skip, int count, int mode,
                                 const char* message) {
  Selector* s = SelectorNamed(selector);
  if (count <= 0) return;
  Bookkeeping lock;
  s->failures.push_back({skip, count, mode, message == nullptr ? "" : message});
}

FAKE_EXPORT void fake_metal_clear_failures() {
  Bookkeeping lock;
  for (const auto& [name, selector] : tables().selectors) selector->failures.clear();
}

FAKE_EXPORT void fake_metal_set_abort(int yes) {
  Bookkeeping lock;
  tables().abort_on_fault = yes != 0;
}

FAKE_EXPORT const char* fake_metal_faults() {
  std::string text;
  {
    Bookkeeping lock;
    text = tables().faults;
  }
  return Keep(text);
}

FAKE_EXPORT void fake_metal_clear_faults() {
  Bookkeeping lock;
  tables().faults.clear();
}

}  // extern "C"

}  // namespace fake
