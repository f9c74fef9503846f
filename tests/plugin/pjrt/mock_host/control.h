// What tests make the mock host do: wrong answers to calls, late events; and what they ask
// it: how often it was called, which rules its caller broke.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "tests/plugin/pjrt/mock_host/backend.h"

namespace mock {

constexpr const char* kSlotNames[] = {
#define JFM_MOCK_SLOT(name) #name,
    JFM_PJRT_SLOTS(JFM_MOCK_SLOT)
#undef JFM_MOCK_SLOT
};

inline std::atomic<int64_t> num_calls[kNumSlots];
inline std::atomic<int> delay_ms{0};

// A wrong answer: of a call that succeeds, "error" apart.
struct WrongAnswer {
  Slot slot;
  const char* name;
  void (*apply)(void* args);
};

template <class Args>
Args& As(void* args) {
  return *static_cast<Args*>(args);
}

#define JFM_WRONG(slot, name, change) \
  {Slot::k##slot, name, [](void* args) { As<PJRT_##slot##_Args>(args).change; }}
inline PJRT_Device* no_devices[2];
void* SmallObject();  // of 4 bytes, see memory.h
inline const WrongAnswer kWrongAnswers[] = {
    JFM_WRONG(Client_Create, "null", client = nullptr),
    JFM_WRONG(Client_PlatformName, "null", platform_name = nullptr),
    JFM_WRONG(Client_PlatformName, "empty", platform_name_size = 0),
    {Slot::kClient_PlatformName, "other",
     [](void* args) {
       As<PJRT_Client_PlatformName_Args>(args).platform_name = "OTHER";
       As<PJRT_Client_PlatformName_Args>(args).platform_name_size = 5;
     }},
    JFM_WRONG(Client_PlatformVersion, "null", platform_version = nullptr),
    JFM_WRONG(Client_PlatformVersion, "empty", platform_version_size = 0),
    {Slot::kClient_PlatformVersion, "other",
     [](void* args) {
       As<PJRT_Client_PlatformVersion_Args>(args).platform_version = "2.0";
       As<PJRT_Client_PlatformVersion_Args>(args).platform_version_size = 3;
     }},
    JFM_WRONG(Client_AddressableDevices, "null", addressable_devices = nullptr),
    JFM_WRONG(Client_AddressableDevices, "null device", addressable_devices = no_devices),
    JFM_WRONG(Client_AddressableDevices, "none", num_addressable_devices = 0),
    JFM_WRONG(Client_AddressableDevices, "two", num_addressable_devices = 2),
    JFM_WRONG(Client_Compile, "null", executable = nullptr),
    JFM_WRONG(LoadedExecutable_GetExecutable, "null", executable = nullptr),
    JFM_WRONG(Executable_OutputElementTypes, "null", output_types = nullptr),
    JFM_WRONG(Executable_OutputDimensions, "null", dims = nullptr),
    JFM_WRONG(Executable_OutputDimensions, "fewer", num_outputs = 0),
    JFM_WRONG(LoadedExecutable_Execute, "null", output_lists[0][0] = nullptr),
    JFM_WRONG(Buffer_ReadyEvent, "null", event = nullptr),
    JFM_WRONG(Buffer_OpaqueDeviceMemoryDataPointer, "null", device_memory_ptr = nullptr),
    {Slot::kBuffer_OpaqueDeviceMemoryDataPointer, "odd",
     [](void* args) {
       void*& pointer = As<PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args>(args).device_memory_ptr;
       pointer = static_cast<char*>(pointer) + 1;
     }},
    {Slot::kBuffer_OpaqueDeviceMemoryDataPointer, "small",
     [](void* args) {
       As<PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args>(args).device_memory_ptr = SmallObject();
     }},
    JFM_WRONG(Buffer_Dimensions, "null", dims = nullptr),
    JFM_WRONG(Buffer_Dimensions, "short", num_dims = 0),
    JFM_WRONG(Buffer_OnDeviceSizeInBytes, "small", on_device_size_in_bytes = 4),
    JFM_WRONG(Buffer_ToHostBuffer, "null", event = nullptr),
    JFM_WRONG(Client_BufferFromHostBuffer, "null", buffer = nullptr),
    JFM_WRONG(Client_BufferFromHostBuffer, "null event", done_with_host_buffer = nullptr),
    JFM_WRONG(Client_CreateViewOfDeviceBuffer, "null", buffer = nullptr),
    JFM_WRONG(Client_CreateUninitializedBuffer, "null", buffer = nullptr),
    JFM_WRONG(Client_CreateAliasBuffer, "null", alias_buffer = nullptr),
    JFM_WRONG(Event_Create, "null", event = nullptr),
};
#undef JFM_WRONG

struct ArmedFault {
  Slot slot;
  std::string name;
  int skip;
  int count;
};
inline std::mutex control_mutex;  // guards the two below
inline std::vector<ArmedFault> armed;
inline std::string broken_rules;

inline bool Arm(const std::string& fault, int skip, int count) {
  const size_t colon = fault.find(':');
  const std::string slot = fault.substr(0, colon);
  for (size_t i = 0; i < kNumSlots; ++i) {
    if (slot != kSlotNames[i]) continue;
    std::lock_guard<std::mutex> lock(control_mutex);
    armed.push_back({static_cast<Slot>(i), fault.substr(colon + 1), skip, count});
    return true;
  }
  return false;
}

// The name of the fault that this call shall have; "" for none.
inline std::string NextFault(Slot slot) {
  std::lock_guard<std::mutex> lock(control_mutex);
  for (ArmedFault& fault : armed) {
    if (fault.slot != slot || fault.count == 0) continue;
    if (fault.skip-- > 0) return "";
    --fault.count;
    return fault.name;
  }
  return "";
}

// The mock goes on: tests ask at their end.
inline void BreaksRule(const std::string& rule) {
  std::lock_guard<std::mutex> lock(control_mutex);
  broken_rules += rule + "\n";
}

// The function behind a slot, counted and, if a test wants that, spoiled.
template <int kSlot>
PJRT_Function inner_function = nullptr;

template <int kSlot>
PJRT_Error* Watched(void* args) {
  constexpr Slot slot = static_cast<Slot>(kSlot);
  ++num_calls[kSlot];
  const std::string fault = NextFault(slot);
  if (fault == "error")
    return Error(kInternal, "injected error of " + std::string(kSlotNames[kSlot]));
  PJRT_Error* error = inner_function<kSlot>(args);
  if (fault.empty() || error != nullptr) return error;
  for (const WrongAnswer& answer : kWrongAnswers) {
    if (answer.slot == slot && fault == answer.name) {
      answer.apply(args);
      return nullptr;
    }
  }
  std::fprintf(stderr, "mock host: no fault %s:%s\n", kSlotNames[kSlot], fault.c_str());
  std::abort();
}

// Not of errors: their functions return nothing, and report what goes wrong elsewhere.
constexpr bool MayBeWatched(int slot) {
  return slot > static_cast<int>(Slot::kError_GetCode) &&
         slot != static_cast<int>(Slot::kError_ForEachPayload);
}

template <int... kSlots>
void WatchAll(PJRT_Api* api, std::integer_sequence<int, kSlots...>) {
  const auto watch = [&](PJRT_Function& slot, PJRT_Function& inner, PJRT_Function watched,
                         bool may_be) {
    if (slot == nullptr || !may_be) return;
    inner = slot;
    slot = watched;
  };
  (watch(api->slots[kSlots], inner_function<kSlots>, Watched<kSlots>, MayBeWatched(kSlots)), ...);
}

}  // namespace mock

#define JFM_MOCK_EXPORT extern "C" __attribute__((visibility("default")))

// "Slot:answer" as in kWrongAnswers, or "Slot:error"; 1 if there is such a slot.
JFM_MOCK_EXPORT int mock_host_fault(const char* fault, int skip, int count) {
  return mock::Arm(fault, skip, count);
}
// That have not happened yet.
JFM_MOCK_EXPORT int mock_host_pending_faults() {
  std::lock_guard<std::mutex> lock(mock::control_mutex);
  int pending = 0;
  for (const mock::ArmedFault& fault : mock::armed) pending += fault.count;
  return pending;
}
JFM_MOCK_EXPORT void mock_host_clear_faults() {
  std::lock_guard<std::mutex> lock(mock::control_mutex);
  mock::armed.clear();
}
// Of the slot with this name, -1 if there is none.
JFM_MOCK_EXPORT int64_t mock_host_calls(const char* name) {
  for (size_t i = 0; i < jfm::pjrt::kNumSlots; ++i) {
    if (std::strcmp(name, mock::kSlotNames[i]) == 0) return mock::num_calls[i];
  }
  return -1;
}
// From now on events are ready so much later than they could be.
JFM_MOCK_EXPORT void mock_host_set_delay_ms(int delay) { mock::delay_ms = delay; }
// Rules that the caller broke, one a line; cut to the size.
JFM_MOCK_EXPORT void mock_host_broken_rules(char* text, size_t size) {
  std::lock_guard<std::mutex> lock(mock::control_mutex);
  std::snprintf(text, size, "%s", mock::broken_rules.c_str());
}
