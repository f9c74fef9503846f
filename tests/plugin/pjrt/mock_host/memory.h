// Device memory as each host presents it: what its pointers are, and how strict it is. Until
// the event that says that a buffer is ready has been waited for, a pointer leads to NaNs
// and what is written there is lost.
#pragma once

#include <dlfcn.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <thread>

#include "tests/plugin/device/fake_metal/fake_metal.h"
#include "tests/plugin/pjrt/mock_host/control.h"

namespace mock {

enum class Pointers {
  kHandles,      // odd numbers that nobody can follow (jax-metal, without a fake Metal)
  kObjects,      // id<MTLBuffer> of the fake Metal (jax-metal)
  kAddresses,    // jax-graft, CPU
  kTemporaries,  // addresses, of a copy that lives as long as external references (metaljax)
  kNull,         // jax-mps
};
inline Pointers pointers = Pointers::kHandles;
constexpr unsigned char kPoison = 0xff;  // a NaN in every type of floats

// The fake Metal's functions; those of no other library.
struct FakeMetal {
  decltype(&fake_metal_new_buffer) new_buffer;
  decltype(&fake_metal_buffer_bytes) bytes;
  decltype(&fake_metal_buffer_length) length;
  decltype(&fake_metal_release) release;
  decltype(&fake_metal_is_alive_buffer) is_alive;
};
inline FakeMetal fake = {};

inline bool LoadFakeMetal(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "mock host: %s\n", dlerror());
    return false;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    return function != nullptr;
  };
  return find(fake.new_buffer, "fake_metal_new_buffer") &&
         find(fake.bytes, "fake_metal_buffer_bytes") &&
         find(fake.length, "fake_metal_buffer_length") &&
         find(fake.release, "fake_metal_release") &&
         find(fake.is_alive, "fake_metal_is_alive_buffer");
}

inline void* SmallObject() {
  static void* const object = fake.new_buffer(4, 1);
  return object;
}

struct BufferState {
  bool is_ready = false;           // its event was waited for
  bool is_view = false;            // of an object of the caller's
  int references = 0;              // external ones
  void* object = nullptr;          // kObjects
  std::unique_ptr<char[]> shadow;  // kTemporaries, and poison
  uintptr_t handle = 0;            // kHandles
};

struct Memory {
  std::mutex mutex;  // guards the rest
  std::map<PJRT_Buffer*, BufferState> buffers;
  // What happens when an event is waited for.
  std::map<PJRT_Event*, std::function<void()>> events;
  uintptr_t next_handle = 0x6d74'0001;
  std::map<uintptr_t, void*> addresses;          // by handle
  std::set<PJRT_LoadedExecutable*> overwriting;  // programs that reuse arguments
};
inline Memory& memory = *new Memory;  // never destroyed: callbacks may come late

inline void* BackendAddress(PJRT_Buffer* buffer) {
  PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args args = {};
  args.buffer = buffer;
  Demand(args);
  return args.device_memory_ptr;
}
inline size_t BackendSize(PJRT_Buffer* buffer) {
  PJRT_Buffer_OnDeviceSizeInBytes_Args args = {};
  args.buffer = buffer;
  Demand(args);
  return args.on_device_size_in_bytes;
}

// Under the mutex.
inline char* Content(BufferState& state) {
  return state.object != nullptr ? static_cast<char*>(fake.bytes(state.object))
                                 : state.shadow.get();
}
inline void FillIn(PJRT_Buffer* buffer, BufferState& state) {
  if (state.is_view || Content(state) == nullptr) return;
  std::memcpy(Content(state), BackendAddress(buffer), BackendSize(buffer));
}
inline void DropMemory(BufferState& state) {
  if (state.object != nullptr && !state.is_view) fake.release(state.object);
  state.object = nullptr;
  state.shadow.reset();
  memory.addresses.erase(state.handle);
  state.handle = 0;
}
inline void Forget(PJRT_Buffer* buffer) {
  std::lock_guard<std::mutex> lock(memory.mutex);
  const auto found = memory.buffers.find(buffer);
  if (found == memory.buffers.end()) return;
  if (found->second.references > 0) BreaksRule("a buffer was freed while it was referenced");
  DropMemory(found->second);
  memory.buffers.erase(found);
}

// -- Events -----------------------------------------------------------------------------

inline void WhenAwaited(PJRT_Event* event, std::function<void()> action) {
  std::lock_guard<std::mutex> lock(memory.mutex);
  memory.events[event] = std::move(action);
}
inline void Fire(PJRT_Event* event) {
  std::function<void()> action;
  {
    std::lock_guard<std::mutex> lock(memory.mutex);
    const auto found = memory.events.find(event);
    if (found == memory.events.end()) return;
    action = std::move(found->second);
    memory.events.erase(found);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
  action();
}

inline PJRT_Error* ReadyEvent(PJRT_Buffer_ReadyEvent_Args* args) {
  if (PJRT_Error* error = ToBackend(args)) return error;
  WhenAwaited(args->event, [buffer = args->buffer] {
    std::lock_guard<std::mutex> lock(memory.mutex);
    BufferState& state = memory.buffers[buffer];
    if (state.is_ready) return;
    state.is_ready = true;
    FillIn(buffer, state);
  });
  return nullptr;
}
inline PJRT_Error* EventAwait(PJRT_Event_Await_Args* args) {
  PJRT_Error* error = ToBackend(args);
  if (error == nullptr) Fire(args->event);
  return error;
}
inline PJRT_Error* EventIsReady(PJRT_Event_IsReady_Args* args) {
  PJRT_Error* error = ToBackend(args);
  if (error == nullptr && args->is_ready) Fire(args->event);
  return error;
}
inline PJRT_Error* EventDestroy(PJRT_Event_Destroy_Args* args) {
  {
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.events.erase(args->event);
  }
  return ToBackend(args);
}
struct EventCallback {
  PJRT_EventCallback callback;
  void* user_arg;
  PJRT_Event* event;
};
inline void RunEventCallback(PJRT_Error* theirs, void* arg) {
  const EventCallback* wrapped = static_cast<EventCallback*>(arg);
  if (theirs == nullptr) Fire(wrapped->event);
  wrapped->callback(TakeError(theirs), wrapped->user_arg);
  delete wrapped;
}
inline PJRT_Error* EventOnReady(PJRT_Event_OnReady_Args* args) {
  PJRT_Event_OnReady_Args own = *args;
  own.callback = RunEventCallback;
  own.user_arg = new EventCallback{args->callback, args->user_arg, args->event};
  return ToBackend(&own);
}

// -- Pointers ---------------------------------------------------------------------------

inline PJRT_Error* PointerTo(PJRT_Buffer* buffer, bool must_be_referenced, void** pointer) {
  const size_t size = BackendSize(buffer);
  void* const address = BackendAddress(buffer);
  std::lock_guard<std::mutex> lock(memory.mutex);
  BufferState& state = memory.buffers[buffer];
  if (must_be_referenced && state.references == 0 &&
      (pointers == Pointers::kObjects || pointers == Pointers::kTemporaries)) {
    BreaksRule("a pointer was asked for without an external reference");
  }
  *pointer = nullptr;
  switch (pointers) {
    case Pointers::kNull:
      return nullptr;
    case Pointers::kHandles:
      if (state.handle == 0) {
        state.handle = memory.next_handle;
        memory.next_handle += 2;
      }
      memory.addresses[state.handle] = address;
      *pointer = reinterpret_cast<void*>(state.handle);
      return nullptr;
    case Pointers::kObjects:
      if (size == 0) return nullptr;
      if (state.object == nullptr) {
        state.object = fake.new_buffer(size, 1);  // poisoned
        if (state.is_ready) FillIn(buffer, state);
      } else if (!fake.is_alive(state.object)) {
        BreaksRule("the object of a view was freed while the host has it");
        return Error(kInternal, "mock host: a freed object.");
      }
      *pointer = state.object;
      return nullptr;
    case Pointers::kAddresses:
      *pointer = address;
      if (state.is_ready || size == 0) return nullptr;
      state.shadow.reset(new char[size]);
      std::memset(state.shadow.get(), kPoison, size);
      *pointer = state.shadow.get();
      return nullptr;
    case Pointers::kTemporaries:
      if (state.shadow == nullptr) {
        state.shadow.reset(new char[size + 1]);
        std::memset(state.shadow.get(), kPoison, size);
        if (state.is_ready) FillIn(buffer, state);
      }
      *pointer = state.shadow.get();
      return nullptr;
  }
  return nullptr;
}
inline PJRT_Error* UnsafePointer(PJRT_Buffer_UnsafePointer_Args* args) {
  void* pointer = nullptr;
  PJRT_Error* error = PointerTo(args->buffer, false, &pointer);
  args->buffer_pointer = reinterpret_cast<uintptr_t>(pointer);
  return error;
}
inline PJRT_Error* OpaquePointer(PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args* args) {
  return PointerTo(args->buffer, true, &args->device_memory_ptr);
}

inline PJRT_Error* IncreaseReferences(PJRT_Buffer_IncreaseExternalReferenceCount_Args* args) {
  if (PJRT_Error* error = ToBackend(args)) return error;
  std::lock_guard<std::mutex> lock(memory.mutex);
  ++memory.buffers[args->buffer].references;
  return nullptr;
}
inline PJRT_Error* DecreaseReferences(PJRT_Buffer_DecreaseExternalReferenceCount_Args* args) {
  {
    std::lock_guard<std::mutex> lock(memory.mutex);
    BufferState& state = memory.buffers[args->buffer];
    if (--state.references == 0 && pointers == Pointers::kTemporaries && state.shadow) {
      const size_t size = BackendSize(args->buffer);
      if (state.is_ready &&
          std::memcmp(state.shadow.get(), BackendAddress(args->buffer), size) != 0) {
        BreaksRule("an operand was written, whose memory others may share");
      }
      std::memset(state.shadow.get(), kPoison, BackendSize(args->buffer));
      state.shadow.reset();
    }
  }
  return ToBackend(args);
}

// -- Views ------------------------------------------------------------------------------

struct DeleteCallback {
  void (*callback)(void*, void*);
  void* object;
  void* user_arg;
};
inline void RunDeleteCallback(void*, void* arg) {
  const DeleteCallback* wrapped = static_cast<DeleteCallback*>(arg);
  if (pointers == Pointers::kObjects && !fake.is_alive(wrapped->object)) {
    BreaksRule("the object of a view was freed before the view");
  }
  if (wrapped->callback != nullptr) wrapped->callback(wrapped->object, wrapped->user_arg);
  delete wrapped;
}
inline PJRT_Error* CreateView(PJRT_Client_CreateViewOfDeviceBuffer_Args* args) {
  if (args->stream != 0) return Error(kInternal, "mock host: no stream has this handle.");
  void* address = nullptr;
  if (pointers == Pointers::kObjects) {
    if (!fake.is_alive(args->device_buffer_ptr)) {
      return Error(kInternal, "mock host: a view of what is no object; Apple's crashes.");
    }
    address = fake.bytes(args->device_buffer_ptr);
  } else if (pointers == Pointers::kHandles) {
    std::lock_guard<std::mutex> lock(memory.mutex);
    auto found = memory.addresses.find(reinterpret_cast<uintptr_t>(args->device_buffer_ptr));
    if (found == memory.addresses.end()) {
      return Error(kInternal, "mock host: a view of what is no device buffer; Apple's crashes.");
    }
    address = found->second;
  } else {
    return Error(kInternal, "mock host: the pointer is not inside any allocation.");
  }
  PJRT_Client_CreateViewOfDeviceBuffer_Args own = *args;
  own.struct_size = sizeof(own);
  own.device_buffer_ptr = address;
  own.memory = nullptr;
  own.on_delete_callback = RunDeleteCallback;
  own.on_delete_callback_arg = new DeleteCallback{args->on_delete_callback, args->device_buffer_ptr,
                                                  args->on_delete_callback_arg};
  PJRT_Error* error = ToBackend(&own);
  args->buffer = own.buffer;
  if (error == nullptr && pointers == Pointers::kObjects) {
    std::lock_guard<std::mutex> lock(memory.mutex);
    BufferState& state = memory.buffers[own.buffer];
    state.is_view = true;
    state.object = args->device_buffer_ptr;
  }
  return error;
}

// jax-metal would free memory that is not its own.
inline void CheckViews(const PJRT_LoadedExecutable_Execute_Args& args) {
  std::lock_guard<std::mutex> lock(memory.mutex);
  if (memory.overwriting.count(args.executable) == 0) return;
  const int64_t* const kept = args.options->non_donatable_input_indices;
  const int64_t* const end = kept + args.options->num_non_donatable_input_indices;
  for (size_t i = 0; i < args.num_args; ++i) {
    const auto found = memory.buffers.find(args.argument_lists[0][i]);
    if (found == memory.buffers.end() || !found->second.is_view) continue;
    if (std::find(kept, end, static_cast<int64_t>(i)) == end) {
      BreaksRule("a view was given away to a program that may overwrite it");
    }
  }
}

// -- The end of buffers -------------------------------------------------------------------

inline PJRT_Error* BufferDestroy(PJRT_Buffer_Destroy_Args* args) {
  Forget(args->buffer);
  return ToBackend(args);
}
// A deleted buffer has no memory, unless somebody refers to that.
inline PJRT_Error* BufferDelete(PJRT_Buffer_Delete_Args* args) {
  {
    std::lock_guard<std::mutex> lock(memory.mutex);
    const auto found = memory.buffers.find(args->buffer);
    if (found != memory.buffers.end() && found->second.references == 0) DropMemory(found->second);
  }
  return ToBackend(args);
}

// What comes back from the device is there once its event was waited for.
inline PJRT_Error* ToHostBuffer(PJRT_Buffer_ToHostBuffer_Args* args) {
  if (args->dst == nullptr || args->dst_size == 0) return ToBackend(args);
  PJRT_Buffer_ToHostBuffer_Args own = *args;
  auto content = std::make_shared<std::unique_ptr<char[]>>(new char[args->dst_size]);
  own.dst = content->get();
  if (PJRT_Error* error = ToBackend(&own)) return error;
  args->event = own.event;
  std::memset(args->dst, kPoison, args->dst_size);
  WhenAwaited(own.event, [content, dst = args->dst, size = args->dst_size] {
    std::memcpy(dst, content->get(), size);
  });
  return nullptr;
}

}  // namespace mock
