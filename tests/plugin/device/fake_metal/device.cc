// MTLDevice and MTLBuffer, and the device's properties that tests set.
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/plugin/device/fake_metal/fake_metal.h"
#include "tests/plugin/device/fake_metal/metal.h"

namespace fake {

// ---- Settings ------------------------------------------------------------------------

namespace {

std::map<std::string, int64_t> FirstFacts() {
  return {{"has_device", 1},
          {"family", 1009},
          {"hasUnifiedMemory", 1},
          {"maxThreadgroupMemoryLength", 32768},
          {"maxBufferLength", int64_t{1} << 33},
          {"recommendedMaxWorkingSetSize", int64_t{1} << 34},
          {"threadExecutionWidth", 32},
          {"maxTotalThreadsPerThreadgroup", 1024},
          {"staticThreadgroupMemoryLength", 0},
          {"maxCommandBufferCount", 64},
          {"has_gpu_service", 1},
          {"gpu_core_count", 10}};
}

std::map<std::string, std::string> FirstTexts() {
  return {{"name", "Apple M3 Fake"},
          {"operatingSystemVersionString", "Version 14.6 (Build 23G80)"}};
}

struct Settings {
  std::map<std::string, int64_t> facts = FirstFacts();
  std::map<std::string, std::string> texts = FirstTexts();
  size_t memory_limit = 0;
  size_t allocated = 0;  // bytes of living buffers, NoCopy ones left out
};

// Protected by Bookkeeping.
Settings& settings() {
  static Settings& all = *new Settings;
  return all;
}

[[noreturn]] void Unknown(const char* name) {
  std::fprintf(stderr, "fake_metal: no fact named '%s'.\n", name);
  std::abort();
}

}  // namespace

int64_t Fact(const char* name) {
  Bookkeeping lock;
  const auto found = settings().facts.find(name);
  if (found == settings().facts.end()) Unknown(name);
  return found->second;
}

std::string FactText(const char* name) {
  Bookkeeping lock;
  const auto found = settings().texts.find(name);
  if (found == settings().texts.end()) Unknown(name);
  return found->second;
}

// ---- Labels --------------------------------------------------------------------------

namespace {

constexpr uint64_t kRegistryId = 0x100000ABC;

// The device as another object: what Metal's debugging layers give, or a second GPU.
struct OtherDevice : Object {
  static Class& TheClass();
  uint64_t registry_id = kRegistryId;
};

void DefineOtherDevice(Class& c) {
  c.On("registryID", +[](OtherDevice* self, Selector*) { return self->registry_id; });
}

FAKE_CLASS(OtherDevice, "MTLDebugDevice", &DefineOtherDevice)

Object* DeviceOf(Labelled*, Selector*) {
  const int mode = TakeRunFailure().mode;
  if (mode < 0) return Lent(TheDevice());
  auto* other = Make<OtherDevice>();
  if (mode == FAKE_METAL_OTHER_DEVICE) ++other->registry_id;
  return Autoreleased(other);
}

}  // namespace

void DefineLabelled(Class& c) {
  c.On(
      "label", +[](Labelled* self, Selector*) -> Object* {
        return self->label.empty() ? nullptr : NewText(self->label);
      });
  c.On(
      "setLabel:", +[](Labelled* self, Selector* s, Object* label) {
        bool ok;
        const auto* text = OptionalArgument<String>(self, s, "the label", label, &ok);
        self->label = text == nullptr ? "" : text->text;
      });
  c.On("device", &DeviceOf);
}

// ---- Buffers -------------------------------------------------------------------------

namespace {

size_t PageSize() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

// One byte of each page, written to a pipe by the operating system: past a sanitizer's
// interceptors, which know of red zones inside pages, and without a fault.
bool IsReadable(char* memory, size_t length) {
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  constexpr size_t kMost = 1024;  // iovecs of one call
  const size_t pages = length / PageSize();
  bool ok = true;
  for (size_t first = 0; ok && first < pages; first += kMost) {
    iovec bytes[kMost];
    const size_t count = std::min(kMost, pages - first);
    for (size_t i = 0; i < count; ++i) bytes[i] = {memory + (first + i) * PageSize(), 1};
    ok = syscall(SYS_writev, ends[1], bytes, count) == static_cast<long>(count);
    char sink[kMost];
    if (ok) ok = read(ends[0], sink, count) == static_cast<ssize_t>(count);
  }
  close(ends[0]);
  close(ends[1]);
  return ok;
}

bool CheckOptions(const Object* self, const Selector* s, uint64_t options, bool no_copy) {
  const uint64_t storage = options >> 4 & 15, hazard = options >> 8 & 3;
  std::string wrong;
  if ((options & ~uint64_t{0x3FF}) != 0 || (options & 15) > 1 || hazard == 3) {
    wrong = "there are no such options";
  } else if (storage != kStorageShared && storage != kStoragePrivate) {
    wrong = "a buffer's storage mode must be shared or private on Apple's GPUs";
  } else if (no_copy && storage != kStorageShared) {
    wrong = "memory of the process can only be shared, not private";
  } else if (hazard == kHazardUntracked) {
    wrong = "without hazard tracking nothing orders the kernels that use the buffer";
  }
  if (wrong.empty()) return true;
  Fault(MethodName(self, s) + ": options " + std::to_string(options) + ": " + wrong + ".");
  return false;
}

bool CheckLength(const Object* self, const Selector* s, uint64_t length) {
  if (length == 0) {
    Fault(MethodName(self, s) + ": a buffer of zero length cannot be created.");
    return false;
  }
  const auto most = static_cast<uint64_t>(Fact("maxBufferLength"));
  if (length > most) {
    Fault(MethodName(self, s) + ": length " + std::to_string(length) +
          " must not exceed maxBufferLength " + std::to_string(most) + ".");
    return false;
  }
  return true;
}

// Poisoned; null if it is over the limit.
Buffer* Allocate(uint64_t length, uint64_t options) {
  {
    Bookkeeping lock;
    Settings& all = settings();
    if (all.memory_limit != 0 &&
        length > all.memory_limit - std::min(all.allocated, all.memory_limit)) {
      return nullptr;
    }
    all.allocated += length;
  }
  const size_t page = PageSize();
  void* memory = nullptr;
  if (posix_memalign(&memory, page, (length + page - 1) / page * page) != 0) {
    Bookkeeping lock;
    settings().allocated -= length;
    return nullptr;
  }
  std::memset(memory, FAKE_METAL_POISON, length);
  auto* buffer = Make<Buffer>();
  buffer->memory = static_cast<char*>(memory);
  buffer->length = length;
  buffer->options = options;
  buffer->owned = true;
  return buffer;
}

void DefineBuffer(Class& c) {
  DefineLabelled(c);
  c.On("length", +[](Buffer* self, Selector*) -> uint64_t { return self->length; });
  c.On(
      "allocatedSize", +[](Buffer* self, Selector*) -> uint64_t {
        return (self->length + PageSize() - 1) / PageSize() * PageSize();
      });
  // As documented: NULL for private memory.
  c.On(
      "contents", +[](Buffer* self, Selector*) -> void* {
        return (self->options >> 4 & 15) == kStoragePrivate ? nullptr : self->memory;
      });
  // Not an address of the process.
  c.On(
      "gpuAddress", +[](Buffer* self, Selector*) -> uint64_t {
        return reinterpret_cast<uint64_t>(self->memory) | uint64_t{1} << 56;
      });
  c.On("resourceOptions", +[](Buffer* self, Selector*) { return self->options; });
  c.On("storageMode", +[](Buffer* self, Selector*) { return self->options >> 4 & 15; });
  c.On(
      "didModifyRange:", +[](Buffer* self, Selector* s, Range) {
        Fault(MethodName(self, s) + ": the storage mode is not managed.");
      });
}

}  // namespace

FAKE_CLASS(Buffer, "MTLBuffer", &DefineBuffer)

Buffer::~Buffer() {
  if (owned) {
    std::free(memory);
    Bookkeeping lock;
    settings().allocated -= length;
  }
  if (deallocator != nullptr) {
    reinterpret_cast<void (*)(BlockLiteral*, void*, uint64_t)>(BlockFunction(deallocator))(
        deallocator, memory, length);
    ReleaseBlock(deallocator);
  }
}

// ---- The device ----------------------------------------------------------------------

namespace {

void DefineDevice(Class& c) {
  c.is_counted = false;
  c.On("name", +[](Object*, Selector*) { return NewText(FactText("name")); });
  c.On("registryID", +[](Object*, Selector*) { return kRegistryId; });
  c.On("hasUnifiedMemory", +[](Object*, Selector*) { return Fact("hasUnifiedMemory") != 0; });
  for (const char* name :
       {"recommendedMaxWorkingSetSize", "maxThreadgroupMemoryLength", "maxBufferLength"}) {
    c.On(
        name, +[](Object*, Selector* s) -> uint64_t {
          return static_cast<uint64_t>(Fact(s->name.c_str()));
        });
  }
  c.On(
      "currentAllocatedSize", +[](Object*, Selector*) -> uint64_t {
        Bookkeeping lock;
        return settings().allocated;
      });
  c.On(
      "supportsFamily:", +[](Object* self, Selector* s, int64_t family) {
        const int64_t newest = Fact("family");
        if (family >= 1001 && family < 1100) return family <= newest;
        if (family >= 3001 && family <= 3003) return true;  // common
        if (family == 2001 || family == 2002 || family == 5001)
          return newest >= 1007;  // Mac, Metal 3
        Fault(MethodName(self, s) + ": " + std::to_string(family) + " is no MTLGPUFamily.");
        return false;
      });

  c.On(
      "newBufferWithLength:options:",
      +[](Object* self, Selector* s, uint64_t length, uint64_t options) -> Buffer* {
        if (!CheckOptions(self, s, options, false) || !CheckLength(self, s, length)) {
          return nullptr;
        }
        return Allocate(length, options);
      });
  c.On(
      "newBufferWithBytes:length:options:",
      +[](Object* self, Selector* s, const void* bytes, uint64_t length,
          uint64_t options) -> Buffer* {
        if (!CheckOptions(self, s, options, true) || !CheckLength(self, s, length)) {
          return nullptr;
        }
        if (bytes == nullptr) {
          Fault(MethodName(self, s) + ": the bytes are NULL.");
          return nullptr;
        }
        Buffer* buffer = Allocate(length, options);
        if (buffer != nullptr) std::memcpy(buffer->memory, bytes, length);
        return buffer;
      });
  c.On(
      "newBufferWithBytesNoCopy:length:options:deallocator:",
      +[](Object* self, Selector* s, void* bytes, uint64_t length, uint64_t options,
          const void* deallocator) -> Buffer* {
        if (!CheckOptions(self, s, options, true) || !CheckLength(self, s, length)) {
          return nullptr;
        }
        const size_t page = PageSize();
        if (bytes == nullptr || reinterpret_cast<uintptr_t>(bytes) % page != 0) {
          Fault(MethodName(self, s) + ": the pointer is not aligned to a page of " +
                std::to_string(page) + " bytes.");
          return nullptr;
        }
        if (length % page != 0) {
          Fault(MethodName(self, s) + ": length " + std::to_string(length) +
                " is not a multiple of the page size " + std::to_string(page) + ".");
          return nullptr;
        }
        if (!IsReadable(static_cast<char*>(bytes), length)) {
          Fault(MethodName(self, s) + ": " + std::to_string(length) +
                " bytes are not all memory of this process.");
          return nullptr;
        }
        const int failure = TakeRunFailure().mode;
        if (failure == FAKE_METAL_FALSE_ALIAS) return Allocate(length, options);
        BlockLiteral* block = nullptr;
        if (deallocator != nullptr) {
          block = CopyBlock(deallocator, MethodName(self, s));
          if (block == nullptr) return nullptr;
        }
        auto* buffer = Make<Buffer>();
        buffer->memory = static_cast<char*>(bytes);
        buffer->length = failure == FAKE_METAL_EMPTY_ALIAS ? 0 : length;
        buffer->options = options;
        buffer->deallocator = block;
        return buffer;
      });
  DefineLibraryFactories(c);
  DefineQueueFactories(c);
}

}  // namespace

FAKE_CLASS(Device, "MTLDevice", &DefineDevice)

Device* TheDevice() {
  static Device* device = [] {
    Device* made = Make<Device>();
    Retain(made, kInternal);  // the system's own reference
    Release(made, kExternal);
    return made;
  }();
  return device;
}

// ---- fake_metal.h --------------------------------------------------------------------

extern "C" {

FAKE_EXPORT Object* MTLCreateSystemDefaultDevice() {
  if (Fact("has_device") == 0) return nullptr;
  Retain(TheDevice(), kExternal);
  return TheDevice();
}

FAKE_EXPORT int64_t fake_metal_device_references() {
  return static_cast<int64_t>(ExternalReferences(*TheDevice()));
}

FAKE_EXPORT int fake_metal_is_alive_buffer(void* object) {
  return IsAlive(object) && static_cast<Object*>(object)->isa == &Buffer::TheClass();
}

FAKE_EXPORT void* fake_metal_new_buffer(size_t bytes, int private_storage) {
  if (bytes == 0) return nullptr;
  return static_cast<Object*>(Allocate(bytes, private_storage != 0 ? kStoragePrivate << 4 : 0));
}

FAKE_EXPORT void* fake_metal_buffer_bytes(void* buffer) {
  return fake_metal_is_alive_buffer(buffer) != 0
             ? static_cast<Buffer*>(static_cast<Object*>(buffer))->memory
             : nullptr;
}

FAKE_EXPORT size_t fake_metal_buffer_length(void* buffer) {
  return fake_metal_is_alive_buffer(buffer) != 0
             ? static_cast<Buffer*>(static_cast<Object*>(buffer))->length
             : 0;
}

FAKE_EXPORT void fake_metal_set_memory_limit(size_t bytes) {
  Bookkeeping lock;
  settings().memory_limit = bytes;
}

FAKE_EXPORT void fake_metal_set_fact(const char* name, int64_t value) {
  Bookkeeping lock;
  const auto found = settings().facts.find(name);
  if (found == settings().facts.end()) Unknown(name);
  found->second = value;
}

FAKE_EXPORT void fake_metal_set_text(const char* name, const char* value) {
  Bookkeeping lock;
  const auto found = settings().texts.find(name);
  if (found == settings().texts.end()) Unknown(name);
  found->second = value;
}

FAKE_EXPORT void fake_metal_reset() {
  fake_metal_hold(0);
  fake_metal_clear_failures();
  fake_metal_set_abort(1);
  Bookkeeping lock;
  settings().facts = FirstFacts();
  settings().texts = FirstTexts();
  settings().memory_limit = 0;
}

}  // extern "C"

}  // namespace fake
