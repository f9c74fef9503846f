// The part of XLA's PJRT C API that our plugin reads, fills in or overrides, written for
// this project; plugin and mock host share it. Functions are numbered slots of one table;
// everything that is not named here is forwarded without being looked at.
//
// Facts that the layout rests on: the API only grows, at the end of its table and of its
// structs, from version 0.40 (the oldest we accept) on; slots 97 and up moved once, at
// 0.57, so hosts of 0.48 to 0.56 are read up to slot 96 only. A comment names the version
// that introduced what is younger than 0.40, as far as it matters to us.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jfm::pjrt {

// The newest version whose slots we know: newer hosts are cut down to it.
constexpr int kKnownMinor = 115;
constexpr int kOldestMinor = 40;
// Memories, and later errors, begin with a pointer to a table of functions; jaxlib goes
// through it when the version that a plugin says it has is at least this (seen in 0.10.2
// and 0.12.0.1).
constexpr int kFunctionTableMinor = 105;

// -- The table ------------------------------------------------------------------------

// X(name of the function) in slot order.
#define JFM_PJRT_SLOTS(X)                                                                      \
  X(Error_Destroy)                                                                             \
  X(Error_Message)                                                                             \
  X(Error_GetCode)                                                                             \
  X(Plugin_Initialize)                                                                         \
  X(Plugin_Attributes)                                                                         \
  X(Event_Destroy)                                                                             \
  X(Event_IsReady)                                                                             \
  X(Event_Error)                                                                               \
  X(Event_Await)                                                                               \
  X(Event_OnReady)                                                                             \
  X(Client_Create)                                                                             \
  X(Client_Destroy)                                                                            \
  X(Client_PlatformName)                                                                       \
  X(Client_ProcessIndex)                                                                       \
  X(Client_PlatformVersion)                                                                    \
  X(Client_Devices)                                                                            \
  X(Client_AddressableDevices)                                                                 \
  X(Client_LookupDevice)                                                                       \
  X(Client_LookupAddressableDevice)                                                            \
  X(Client_AddressableMemories)                                                                \
  X(Client_Compile)                                                                            \
  X(Client_DefaultDeviceAssignment)                                                            \
  X(Client_BufferFromHostBuffer)                                                               \
  X(DeviceDescription_Id)                                                                      \
  X(DeviceDescription_ProcessIndex)                                                            \
  X(DeviceDescription_Attributes)                                                              \
  X(DeviceDescription_Kind)                                                                    \
  X(DeviceDescription_DebugString)                                                             \
  X(DeviceDescription_ToString)                                                                \
  X(Device_GetDescription)                                                                     \
  X(Device_IsAddressable)                                                                      \
  X(Device_LocalHardwareId)                                                                    \
  X(Device_AddressableMemories)                                                                \
  X(Device_DefaultMemory)                                                                      \
  X(Device_MemoryStats)                                                                        \
  X(Memory_Id)                                                                                 \
  X(Memory_Kind)                                                                               \
  X(Memory_DebugString)                                                                        \
  X(Memory_ToString)                                                                           \
  X(Memory_AddressableByDevices)                                                               \
  X(Executable_Destroy)                                                                        \
  X(Executable_Name)                                                                           \
  X(Executable_NumReplicas)                                                                    \
  X(Executable_NumPartitions)                                                                  \
  X(Executable_NumOutputs)                                                                     \
  X(Executable_SizeOfGeneratedCodeInBytes)                                                     \
  X(Executable_GetCostAnalysis)                                                                \
  X(Executable_OutputMemoryKinds)                                                              \
  X(Executable_OptimizedProgram)                                                               \
  X(Executable_Serialize)                                                                      \
  X(LoadedExecutable_Destroy)                                                                  \
  X(LoadedExecutable_GetExecutable)                                                            \
  X(LoadedExecutable_AddressableDevices)                                                       \
  X(LoadedExecutable_Delete)                                                                   \
  X(LoadedExecutable_IsDeleted)                                                                \
  X(LoadedExecutable_Execute)                                                                  \
  X(Executable_DeserializeAndLoad)                                                             \
  X(LoadedExecutable_Fingerprint)                                                              \
  X(Buffer_Destroy)                                                                            \
  X(Buffer_ElementType)                                                                        \
  X(Buffer_Dimensions)                                                                         \
  X(Buffer_UnpaddedDimensions)                                                                 \
  X(Buffer_DynamicDimensionIndices)                                                            \
  X(Buffer_GetMemoryLayout)                                                                    \
  X(Buffer_OnDeviceSizeInBytes)                                                                \
  X(Buffer_Device)                                                                             \
  X(Buffer_Memory)                                                                             \
  X(Buffer_Delete)                                                                             \
  X(Buffer_IsDeleted)                                                                          \
  X(Buffer_CopyToDevice)                                                                       \
  X(Buffer_ToHostBuffer)                                                                       \
  X(Buffer_IsOnCpu)                                                                            \
  X(Buffer_ReadyEvent)                                                                         \
  X(Buffer_UnsafePointer)                                                                      \
  X(Buffer_IncreaseExternalReferenceCount)                                                     \
  X(Buffer_DecreaseExternalReferenceCount)                                                     \
  X(Buffer_OpaqueDeviceMemoryDataPointer)                                                      \
  X(CopyToDeviceStream_Destroy)                                                                \
  X(CopyToDeviceStream_AddChunk)                                                               \
  X(CopyToDeviceStream_TotalBytes)                                                             \
  X(CopyToDeviceStream_GranuleSize)                                                            \
  X(CopyToDeviceStream_CurrentBytes)                                                           \
  X(TopologyDescription_Create)                                                                \
  X(TopologyDescription_Destroy)                                                               \
  X(TopologyDescription_PlatformName)                                                          \
  X(TopologyDescription_PlatformVersion)                                                       \
  X(TopologyDescription_GetDeviceDescriptions)                                                 \
  X(TopologyDescription_Serialize)                                                             \
  X(TopologyDescription_Attributes)                                                            \
  X(Compile)                                                                                   \
  X(Executable_OutputElementTypes)                                                             \
  X(Executable_OutputDimensions)                                                               \
  X(Buffer_CopyToMemory)                                                                       \
  X(Client_CreateViewOfDeviceBuffer)                                                           \
  X(Executable_Fingerprint)                                                                    \
  X(Client_TopologyDescription)                                                                \
  X(Executable_GetCompiledMemoryStats)                                                         \
  X(Memory_Kind_Id)                                                                            \
  X(ExecuteContext_Create)                                                                     \
  X(ExecuteContext_Destroy)                                                                    \
  X(Buffer_CopyRawToHost)                                                                      \
  X(AsyncHostToDeviceTransferManager_Destroy)                                                  \
  X(AsyncHostToDeviceTransferManager_TransferData)                                             \
  X(Client_CreateBuffersForAsyncHostToDevice)                                                  \
  X(AsyncHostToDeviceTransferManager_RetrieveBuffer)                                           \
  X(AsyncHostToDeviceTransferManager_Device)                                                   \
  X(AsyncHostToDeviceTransferManager_BufferCount)                                              \
  X(AsyncHostToDeviceTransferManager_BufferSize)                                               \
  X(AsyncHostToDeviceTransferManager_SetBufferError)                                           \
  X(AsyncHostToDeviceTransferManager_AddMetadata)                                              \
  X(Client_DmaMap)                                                                             \
  X(Client_DmaUnmap)                                                                           \
  X(Client_CreateUninitializedBuffer)                                                          \
  X(Client_UpdateGlobalProcessInfo)                                                            \
  X(TopologyDescription_Deserialize)                                                           \
  X(Client_CreateAliasBuffer)                                                                  \
  X(Client_FulfillAliasBuffer)                                                                 \
  X(LoadedExecutable_GetDeviceAssignment)                                                      \
  X(Client_CreateErrorBuffer)                                                                  \
  X(AsyncHostToDeviceTransferManager_TransferLiteral)                                          \
  X(Buffer_CopyRawToHostFuture)                                                                \
  X(Device_PoisonExecution)                                                                    \
  X(Device_CreateAsyncTrackingEvent)                                                           \
  X(AsyncTrackingEvent_Destroy)                                                                \
  X(Executable_GetCompileOptions)                                                              \
  X(Buffer_DonateWithControlDependency)                                                        \
  X(Event_Create)                                                                              \
  X(Event_Set)                                                                                 \
  X(Device_GetAttributes)                                                                      \
  X(Client_Load)                                                                               \
  X(LoadedExecutable_AddressableDeviceLogicalIds)                                              \
  X(Buffer_Bitcast)                                                                            \
  X(Error_ForEachPayload)                                                                      \
  X(TopologyDescription_Fingerprint)                                                           \
  X(Executable_ParameterMemoryKinds)                                                           \
  X(Device_ClearMemoryStats)                                                                   \
  X(TopologyDescription_MakeCanonicalShapeForMemorySpace)                                      \
  X(TopologyDescription_GetMemorySpaceKindIds)

enum class Slot : int {
#define JFM_PJRT_SLOT(name) k##name,
  JFM_PJRT_SLOTS(JFM_PJRT_SLOT)
#undef JFM_PJRT_SLOT
      kCount
};
constexpr size_t kNumSlots = static_cast<size_t>(Slot::kCount);
// Slots that a host of version 0.47 has: up to Executable_GetCompiledMemoryStats.
constexpr size_t kNumStableSlots =
    static_cast<size_t>(Slot::kExecutable_GetCompiledMemoryStats) + 1;
constexpr int kRearrangedMinor = 57;  // slots from kNumStableSlots on are read from here on

static_assert(static_cast<int>(Slot::kClient_Compile) == 20, "the API's order");
static_assert(static_cast<int>(Slot::kLoadedExecutable_Execute) == 55, "the API's order");
static_assert(static_cast<int>(Slot::kCompile) == 89, "the API's order");
static_assert(kNumStableSlots == 97, "the API's order");
static_assert(static_cast<int>(Slot::kClient_CreateAliasBuffer) == 115, "the API's order");
static_assert(kNumSlots == 138, "the API's order");

struct PJRT_Extension {
  size_t struct_size;
  int32_t type;
  PJRT_Extension* next;
};
enum PJRT_ExtensionType : int32_t {
  PJRT_ExtensionType_GpuCustomCall = 0,
  PJRT_ExtensionType_Profiler = 1,
  PJRT_ExtensionType_CustomPartitioner = 2,
  PJRT_ExtensionType_Stream = 3,
  PJRT_ExtensionType_Layouts = 4,
  PJRT_ExtensionType_FFI = 5,
  PJRT_ExtensionType_MemoryDescriptions = 6,
  PJRT_ExtensionType_PhaseCompile = 9,
};

struct PJRT_Version {
  size_t struct_size;
  PJRT_Extension* extensions;
  int32_t major;
  int32_t minor;
};

// Takes a pointer to the arguments of its slot. All return PJRT_Error*, but for
// Error_Destroy, Error_Message and Error_ForEachPayload, which return nothing.
struct PJRT_Error;
using PJRT_Function = PJRT_Error* (*)(void* args);

struct PJRT_Api {
  size_t struct_size;  // up to the last slot that it has
  PJRT_Extension* extensions;
  PJRT_Version version;
  PJRT_Function slots[kNumSlots];
};
constexpr size_t kApiHeaderSize = offsetof(PJRT_Api, slots);
static_assert(kApiHeaderSize == 40, "the API's layout");

// -- Objects of the host, never looked into -------------------------------------------

struct PJRT_Event;
struct PJRT_Client;
struct PJRT_Device;
struct PJRT_DeviceDescription;
struct PJRT_Executable;
struct PJRT_LoadedExecutable;
struct PJRT_SerializedExecutable;
struct PJRT_Buffer;
struct PJRT_TopologyDescription;
struct PJRT_ExecuteContext;
struct PJRT_FulfillAliasBufferCallback;

// -- Values ---------------------------------------------------------------------------

// absl::StatusCode.
using PJRT_ErrorCode = int32_t;

using PJRT_PayloadVisitor = void (*)(const char* key, size_t key_size, const char* value,
                                     size_t value_size, void* user_arg);
struct PJRT_ErrorFunctions {  // since kFunctionTableMinor
  size_t struct_size;
  size_t instance_size;
  PJRT_Extension* extensions;
  void (*destroy)(PJRT_Error*);
  void (*message)(const PJRT_Error*, const char** message, size_t* message_size);
  PJRT_ErrorCode (*get_code)(const PJRT_Error*);
  void (*for_each_payload)(const PJRT_Error*, PJRT_PayloadVisitor visitor, void* user_arg);
};
struct PJRT_Error {
  const PJRT_ErrorFunctions* functions;
};

struct PJRT_Memory;
struct PJRT_MemoryFunctions {  // since kFunctionTableMinor
  size_t struct_size;
  PJRT_Extension* extensions;
  size_t instance_size;
  void* (*get_user_data)(PJRT_Memory*, const void* key);
  void (*set_user_data)(PJRT_Memory*, const void* key, void* data, void (*destroy)(void*));
};
struct PJRT_Memory {
  const PJRT_MemoryFunctions* functions;
};

// PJRT's own numbering of element types; plan.cc translates from XLA's.
enum PJRT_BufferType : int32_t {
  PJRT_BufferType_INVALID = 0,
  PJRT_BufferType_PRED = 1,
  PJRT_BufferType_S8 = 2,
  PJRT_BufferType_S16 = 3,
  PJRT_BufferType_S32 = 4,
  PJRT_BufferType_S64 = 5,
  PJRT_BufferType_U8 = 6,
  PJRT_BufferType_U16 = 7,
  PJRT_BufferType_U32 = 8,
  PJRT_BufferType_U64 = 9,
  PJRT_BufferType_F16 = 10,
  PJRT_BufferType_F32 = 11,
  PJRT_BufferType_F64 = 12,
  PJRT_BufferType_BF16 = 13,
  PJRT_BufferType_C64 = 14,
  PJRT_BufferType_C128 = 15,
  PJRT_BufferType_F8E5M2 = 16,
  PJRT_BufferType_F8E4M3FN = 17,
  PJRT_BufferType_F8E4M3B11FNUZ = 18,
  PJRT_BufferType_F8E5M2FNUZ = 19,
  PJRT_BufferType_F8E4M3FNUZ = 20,
  PJRT_BufferType_S4 = 21,
  PJRT_BufferType_U4 = 22,
  PJRT_BufferType_TOKEN = 23,
  PJRT_BufferType_S2 = 24,
  PJRT_BufferType_U2 = 25,
  PJRT_BufferType_F8E4M3 = 26,
  PJRT_BufferType_F8E3M4 = 27,
  PJRT_BufferType_F8E8M0FNU = 28,
  PJRT_BufferType_F4E2M1FN = 29,
};

enum PJRT_NamedValueType : int32_t {
  PJRT_NamedValueType_String = 0,
  PJRT_NamedValueType_Int64 = 1,
  PJRT_NamedValueType_Int64List = 2,
  PJRT_NamedValueType_Float = 3,
  PJRT_NamedValueType_Bool = 4,
};
struct PJRT_NamedValue {
  size_t struct_size;
  PJRT_Extension* extensions;
  const char* name;
  size_t name_size;
  int32_t type;
  union {
    const char* string_value;
    int64_t int64_value;
    const int64_t* int64_array_value;
    float float_value;
    bool bool_value;
  };
  size_t value_size;  // elements of a string or list, otherwise 1
};

struct PJRT_MemoryLayout {
  size_t struct_size;
  PJRT_Extension* extensions;
  struct Tiled {
    size_t struct_size;
    PJRT_Extension* extensions;
    const int64_t* minor_to_major;
    size_t minor_to_major_size;
    const int64_t* tile_dims;
    const size_t* tile_dim_sizes;
    size_t num_tiles;
  } tiled;
  int32_t type;  // 0: tiled
};
static_assert(sizeof(PJRT_MemoryLayout) == 80, "the API's layout");

struct PJRT_Program {
  size_t struct_size;
  PJRT_Extension* extensions;
  char* code;
  size_t code_size;
  const char* format;
  size_t format_size;
};

struct PJRT_ExecuteOptions {
  size_t struct_size;
  PJRT_Extension* extensions;
  void* send_callbacks;
  void* recv_callbacks;
  size_t num_send_ops;
  size_t num_recv_ops;
  int32_t launch_id;
  const int64_t* non_donatable_input_indices;
  size_t num_non_donatable_input_indices;
  PJRT_ExecuteContext* context;  // since 0.64; more members follow in newer versions
};

// -- Arguments ------------------------------------------------------------------------

// Every struct of arguments begins alike, and knows its slot.
#define JFM_PJRT_ARGS(name)                   \
  static constexpr Slot kSlot = Slot::k##name; \
  size_t struct_size;                         \
  PJRT_Extension* extensions

struct PJRT_Error_Destroy_Args {
  JFM_PJRT_ARGS(Error_Destroy);
  PJRT_Error* error;
};
struct PJRT_Error_Message_Args {
  JFM_PJRT_ARGS(Error_Message);
  const PJRT_Error* error;
  const char* message;
  size_t message_size;
};
struct PJRT_Error_GetCode_Args {
  JFM_PJRT_ARGS(Error_GetCode);
  const PJRT_Error* error;
  PJRT_ErrorCode code;
};
struct PJRT_Error_ForEachPayload_Args {
  JFM_PJRT_ARGS(Error_ForEachPayload);
  const PJRT_Error* error;
  PJRT_PayloadVisitor visitor;
  void* user_arg;
};

struct PJRT_Plugin_Initialize_Args {
  JFM_PJRT_ARGS(Plugin_Initialize);
};
struct PJRT_Plugin_Attributes_Args {
  JFM_PJRT_ARGS(Plugin_Attributes);
  const PJRT_NamedValue* attributes;
  size_t num_attributes;
};

struct PJRT_Event_Destroy_Args {
  JFM_PJRT_ARGS(Event_Destroy);
  PJRT_Event* event;
};
struct PJRT_Event_IsReady_Args {
  JFM_PJRT_ARGS(Event_IsReady);
  PJRT_Event* event;
  bool is_ready;
};
struct PJRT_Event_Error_Args {
  JFM_PJRT_ARGS(Event_Error);
  PJRT_Event* event;
};
struct PJRT_Event_Await_Args {
  JFM_PJRT_ARGS(Event_Await);
  PJRT_Event* event;
};
using PJRT_EventCallback = void (*)(PJRT_Error* error, void* user_arg);
struct PJRT_Event_OnReady_Args {
  JFM_PJRT_ARGS(Event_OnReady);
  PJRT_Event* event;
  PJRT_EventCallback callback;
  void* user_arg;
};
struct PJRT_Event_Create_Args {  // since 0.100 or so
  JFM_PJRT_ARGS(Event_Create);
  PJRT_Event* event;
};
struct PJRT_Event_Set_Args {
  JFM_PJRT_ARGS(Event_Set);
  PJRT_Event* event;
  PJRT_ErrorCode error_code;
  const char* error_message;
  size_t error_message_size;
};

struct PJRT_Client_Create_Args {
  JFM_PJRT_ARGS(Client_Create);
  const PJRT_NamedValue* create_options;
  size_t num_options;
  void* kv_get_callback;
  void* kv_get_user_arg;
  void* kv_put_callback;
  void* kv_put_user_arg;
  PJRT_Client* client;
};
struct PJRT_Client_Destroy_Args {
  JFM_PJRT_ARGS(Client_Destroy);
  PJRT_Client* client;
};
struct PJRT_Client_PlatformName_Args {
  JFM_PJRT_ARGS(Client_PlatformName);
  PJRT_Client* client;
  const char* platform_name;
  size_t platform_name_size;
};
struct PJRT_Client_PlatformVersion_Args {
  JFM_PJRT_ARGS(Client_PlatformVersion);
  PJRT_Client* client;
  const char* platform_version;
  size_t platform_version_size;
};
struct PJRT_Client_AddressableDevices_Args {
  JFM_PJRT_ARGS(Client_AddressableDevices);
  PJRT_Client* client;
  PJRT_Device* const* addressable_devices;
  size_t num_addressable_devices;
};
struct PJRT_Client_AddressableMemories_Args {
  JFM_PJRT_ARGS(Client_AddressableMemories);
  PJRT_Client* client;
  PJRT_Memory* const* addressable_memories;
  size_t num_addressable_memories;
};
struct PJRT_Client_Compile_Args {
  JFM_PJRT_ARGS(Client_Compile);
  PJRT_Client* client;
  const PJRT_Program* program;
  const char* compile_options;
  size_t compile_options_size;
  PJRT_LoadedExecutable* executable;
};
enum PJRT_HostBufferSemantics : int32_t {
  PJRT_HostBufferSemantics_ImmutableOnlyDuringCall = 0,
  PJRT_HostBufferSemantics_ImmutableUntilTransferCompletes = 1,
  PJRT_HostBufferSemantics_ImmutableZeroCopy = 2,
  PJRT_HostBufferSemantics_MutableZeroCopy = 3,
};
struct PJRT_Client_BufferFromHostBuffer_Args {
  JFM_PJRT_ARGS(Client_BufferFromHostBuffer);
  PJRT_Client* client;
  const void* data;
  int32_t type;
  const int64_t* dims;
  size_t num_dims;
  const int64_t* byte_strides;
  size_t num_byte_strides;
  int32_t host_buffer_semantics;
  PJRT_Device* device;
  PJRT_Memory* memory;
  PJRT_MemoryLayout* device_layout;
  PJRT_Event* done_with_host_buffer;
  PJRT_Buffer* buffer;
};
struct PJRT_Client_CreateViewOfDeviceBuffer_Args {
  JFM_PJRT_ARGS(Client_CreateViewOfDeviceBuffer);
  PJRT_Client* client;
  void* device_buffer_ptr;
  const int64_t* dims;
  size_t num_dims;
  int32_t element_type;
  PJRT_MemoryLayout* layout;
  PJRT_Device* device;
  void (*on_delete_callback)(void* device_buffer_ptr, void* user_arg);
  void* on_delete_callback_arg;
  intptr_t stream;
  PJRT_Buffer* buffer;
  PJRT_Memory* memory;  // since 0.66
};
struct PJRT_TopologyDescription_PlatformName_Args {
  JFM_PJRT_ARGS(TopologyDescription_PlatformName);
  PJRT_TopologyDescription* topology;
  const char* platform_name;
  size_t platform_name_size;
};
struct PJRT_Client_CreateUninitializedBuffer_Args {  // since 0.69
  JFM_PJRT_ARGS(Client_CreateUninitializedBuffer);
  PJRT_Client* client;
  const int64_t* shape_dims;
  size_t shape_num_dims;
  int32_t shape_element_type;
  PJRT_MemoryLayout* shape_layout;
  PJRT_Device* device;
  PJRT_Memory* memory;
  PJRT_Buffer* buffer;
};
struct PJRT_Client_CreateAliasBuffer_Args {  // since 0.76 or so
  JFM_PJRT_ARGS(Client_CreateAliasBuffer);
  PJRT_Client* client;
  PJRT_Memory* memory;
  const int64_t* shape_dims;
  size_t shape_num_dims;
  int32_t shape_element_type;
  PJRT_MemoryLayout* shape_layout;
  PJRT_Buffer* alias_buffer;
  PJRT_FulfillAliasBufferCallback* fulfill_alias_buffer_cb;
};
struct PJRT_Client_FulfillAliasBuffer_Args {
  JFM_PJRT_ARGS(Client_FulfillAliasBuffer);
  PJRT_Client* client;
  PJRT_Buffer* buffer;
  PJRT_ErrorCode status_code;
  const char* error_message;
  size_t error_message_size;
  PJRT_FulfillAliasBufferCallback* fulfill_alias_buffer_cb;
};

struct PJRT_Client_CreateErrorBuffer_Args {  // since 0.82 or so
  JFM_PJRT_ARGS(Client_CreateErrorBuffer);
  PJRT_Client* client;
  PJRT_ErrorCode error_code;
  const char* error_message;
  size_t error_message_size;
  const int64_t* shape_dims;
  size_t shape_num_dims;
  int32_t shape_element_type;
  PJRT_MemoryLayout* shape_layout;
  PJRT_Memory* memory;
  PJRT_Buffer* buffer;
};

struct PJRT_DeviceDescription_Id_Args {
  JFM_PJRT_ARGS(DeviceDescription_Id);
  PJRT_DeviceDescription* device_description;
  int32_t id;
};
struct PJRT_DeviceDescription_DebugString_Args {
  JFM_PJRT_ARGS(DeviceDescription_DebugString);
  PJRT_DeviceDescription* device_description;
  const char* debug_string;
  size_t debug_string_size;
};
struct PJRT_DeviceDescription_ToString_Args {
  JFM_PJRT_ARGS(DeviceDescription_ToString);
  PJRT_DeviceDescription* device_description;
  const char* to_string;
  size_t to_string_size;
};
struct PJRT_Device_AddressableMemories_Args {
  JFM_PJRT_ARGS(Device_AddressableMemories);
  PJRT_Device* device;
  PJRT_Memory* const* memories;
  size_t num_memories;
};
struct PJRT_Device_DefaultMemory_Args {
  JFM_PJRT_ARGS(Device_DefaultMemory);
  PJRT_Device* device;
  PJRT_Memory* memory;
};
struct PJRT_Memory_Id_Args {
  JFM_PJRT_ARGS(Memory_Id);
  PJRT_Memory* memory;
  int32_t id;
};
struct PJRT_Memory_Kind_Args {
  JFM_PJRT_ARGS(Memory_Kind);
  PJRT_Memory* memory;
  const char* kind;
  size_t kind_size;
};
struct PJRT_Memory_DebugString_Args {
  JFM_PJRT_ARGS(Memory_DebugString);
  PJRT_Memory* memory;
  const char* debug_string;
  size_t debug_string_size;
};
struct PJRT_Memory_ToString_Args {
  JFM_PJRT_ARGS(Memory_ToString);
  PJRT_Memory* memory;
  const char* to_string;
  size_t to_string_size;
};
struct PJRT_Memory_AddressableByDevices_Args {
  JFM_PJRT_ARGS(Memory_AddressableByDevices);
  PJRT_Memory* memory;
  PJRT_Device* const* devices;
  size_t num_devices;
};

struct PJRT_Executable_Destroy_Args {
  JFM_PJRT_ARGS(Executable_Destroy);
  PJRT_Executable* executable;
};
struct PJRT_Executable_NumOutputs_Args {
  JFM_PJRT_ARGS(Executable_NumOutputs);
  PJRT_Executable* executable;
  size_t num_outputs;
};
struct PJRT_Executable_SizeOfGeneratedCodeInBytes_Args {
  JFM_PJRT_ARGS(Executable_SizeOfGeneratedCodeInBytes);
  PJRT_Executable* executable;
  int64_t size_in_bytes;
};
struct PJRT_Executable_GetCostAnalysis_Args {
  JFM_PJRT_ARGS(Executable_GetCostAnalysis);
  PJRT_Executable* executable;
  size_t num_properties;
  const PJRT_NamedValue* properties;
};
struct PJRT_Executable_OutputMemoryKinds_Args {
  JFM_PJRT_ARGS(Executable_OutputMemoryKinds);
  PJRT_Executable* executable;
  size_t num_outputs;
  const char* const* memory_kinds;
  const size_t* memory_kind_sizes;
};
struct PJRT_Executable_OutputElementTypes_Args {
  JFM_PJRT_ARGS(Executable_OutputElementTypes);
  PJRT_Executable* executable;
  const int32_t* output_types;
  size_t num_output_types;
};
struct PJRT_Executable_OutputDimensions_Args {
  JFM_PJRT_ARGS(Executable_OutputDimensions);
  PJRT_Executable* executable;
  size_t num_outputs;
  const int64_t* dims;  // those of all outputs, one after the other
  const size_t* dim_sizes;
};
struct PJRT_Executable_OptimizedProgram_Args {
  JFM_PJRT_ARGS(Executable_OptimizedProgram);
  PJRT_Executable* executable;
  PJRT_Program* program;
};
struct PJRT_Executable_Serialize_Args {
  JFM_PJRT_ARGS(Executable_Serialize);
  const PJRT_Executable* executable;
  const char* serialized_bytes;
  size_t serialized_bytes_size;
  PJRT_SerializedExecutable* serialized_executable;
  void (*serialized_executable_deleter)(PJRT_SerializedExecutable*);
};
struct PJRT_Executable_DeserializeAndLoad_Args {
  JFM_PJRT_ARGS(Executable_DeserializeAndLoad);
  PJRT_Client* client;
  const char* serialized_executable;
  size_t serialized_executable_size;
  PJRT_LoadedExecutable* loaded_executable;
  const char* overridden_serialized_compile_options;  // since 0.71
  size_t overridden_serialized_compile_options_size;
};
struct PJRT_Executable_Fingerprint_Args {
  JFM_PJRT_ARGS(Executable_Fingerprint);
  PJRT_Executable* executable;
  const char* executable_fingerprint;
  size_t executable_fingerprint_size;
};
struct PJRT_Executable_GetCompiledMemoryStats_Args {
  JFM_PJRT_ARGS(Executable_GetCompiledMemoryStats);
  PJRT_Executable* executable;
  int64_t generated_code_size_in_bytes;
  int64_t argument_size_in_bytes;
  int64_t output_size_in_bytes;
  int64_t alias_size_in_bytes;
  int64_t temp_size_in_bytes;
  int64_t host_generated_code_size_in_bytes;
  int64_t host_argument_size_in_bytes;
  int64_t host_output_size_in_bytes;
  int64_t host_alias_size_in_bytes;
  int64_t host_temp_size_in_bytes;
  int64_t peak_memory_in_bytes;  // since 0.72; more members follow in newer versions
};

struct PJRT_LoadedExecutable_Destroy_Args {
  JFM_PJRT_ARGS(LoadedExecutable_Destroy);
  PJRT_LoadedExecutable* executable;
};
struct PJRT_LoadedExecutable_GetExecutable_Args {
  JFM_PJRT_ARGS(LoadedExecutable_GetExecutable);
  PJRT_LoadedExecutable* loaded_executable;
  PJRT_Executable* executable;
};
struct PJRT_LoadedExecutable_IsDeleted_Args {
  JFM_PJRT_ARGS(LoadedExecutable_IsDeleted);
  PJRT_LoadedExecutable* executable;
  bool is_deleted;
};
struct PJRT_LoadedExecutable_Execute_Args {
  JFM_PJRT_ARGS(LoadedExecutable_Execute);
  PJRT_LoadedExecutable* executable;
  PJRT_ExecuteOptions* options;
  PJRT_Buffer* const* const* argument_lists;
  size_t num_devices;
  size_t num_args;
  PJRT_Buffer** const* output_lists;
  PJRT_Event** device_complete_events;
  PJRT_Device* execute_device;
};
struct PJRT_LoadedExecutable_Fingerprint_Args {
  JFM_PJRT_ARGS(LoadedExecutable_Fingerprint);
  PJRT_LoadedExecutable* executable;
  const char* executable_fingerprint;
  size_t executable_fingerprint_size;
};
struct PJRT_ExecuteContext_Destroy_Args {  // since 0.55 or so
  JFM_PJRT_ARGS(ExecuteContext_Destroy);
  PJRT_ExecuteContext* context;
};
struct PJRT_Client_Load_Args {  // a recent slot
  JFM_PJRT_ARGS(Client_Load);
  PJRT_Client* client;
  PJRT_Executable* executable;
  const char* compile_options;
  size_t compile_options_size;
  PJRT_LoadedExecutable* loaded_executable;
};

struct PJRT_Buffer_Destroy_Args {
  JFM_PJRT_ARGS(Buffer_Destroy);
  PJRT_Buffer* buffer;
};
struct PJRT_Buffer_ElementType_Args {
  JFM_PJRT_ARGS(Buffer_ElementType);
  PJRT_Buffer* buffer;
  int32_t type;
};
struct PJRT_Buffer_Dimensions_Args {
  JFM_PJRT_ARGS(Buffer_Dimensions);
  PJRT_Buffer* buffer;
  const int64_t* dims;
  size_t num_dims;
};
struct PJRT_Buffer_Device_Args {
  JFM_PJRT_ARGS(Buffer_Device);
  PJRT_Buffer* buffer;
  PJRT_Device* device;
};
struct PJRT_Buffer_Memory_Args {
  JFM_PJRT_ARGS(Buffer_Memory);
  PJRT_Buffer* buffer;
  PJRT_Memory* memory;
};
struct PJRT_Buffer_Delete_Args {
  JFM_PJRT_ARGS(Buffer_Delete);
  PJRT_Buffer* buffer;
};
struct PJRT_Buffer_IsDeleted_Args {
  JFM_PJRT_ARGS(Buffer_IsDeleted);
  PJRT_Buffer* buffer;
  bool is_deleted;
};
struct PJRT_Buffer_CopyToDevice_Args {
  JFM_PJRT_ARGS(Buffer_CopyToDevice);
  PJRT_Buffer* buffer;
  PJRT_Device* dst_device;
  PJRT_Buffer* dst_buffer;
};
struct PJRT_Buffer_CopyToMemory_Args {
  JFM_PJRT_ARGS(Buffer_CopyToMemory);
  PJRT_Buffer* buffer;
  PJRT_Memory* dst_memory;
  PJRT_Buffer* dst_buffer;
};
struct PJRT_Buffer_ToHostBuffer_Args {
  JFM_PJRT_ARGS(Buffer_ToHostBuffer);
  PJRT_Buffer* src;
  PJRT_MemoryLayout* host_layout;
  void* dst;
  size_t dst_size;
  PJRT_Event* event;
};
struct PJRT_Buffer_IsOnCpu_Args {
  JFM_PJRT_ARGS(Buffer_IsOnCpu);
  PJRT_Buffer* buffer;
  bool is_on_cpu;
};
struct PJRT_Buffer_ReadyEvent_Args {
  JFM_PJRT_ARGS(Buffer_ReadyEvent);
  PJRT_Buffer* buffer;
  PJRT_Event* event;
};
struct PJRT_Buffer_UnsafePointer_Args {
  JFM_PJRT_ARGS(Buffer_UnsafePointer);
  PJRT_Buffer* buffer;
  uintptr_t buffer_pointer;
};
struct PJRT_Buffer_IncreaseExternalReferenceCount_Args {
  JFM_PJRT_ARGS(Buffer_IncreaseExternalReferenceCount);
  PJRT_Buffer* buffer;
};
struct PJRT_Buffer_DecreaseExternalReferenceCount_Args {
  JFM_PJRT_ARGS(Buffer_DecreaseExternalReferenceCount);
  PJRT_Buffer* buffer;
};
struct PJRT_Buffer_OnDeviceSizeInBytes_Args {
  JFM_PJRT_ARGS(Buffer_OnDeviceSizeInBytes);
  PJRT_Buffer* buffer;
  size_t on_device_size_in_bytes;
};
struct PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args {
  JFM_PJRT_ARGS(Buffer_OpaqueDeviceMemoryDataPointer);
  PJRT_Buffer* buffer;
  void* device_memory_ptr;
};
struct PJRT_Buffer_DonateWithControlDependency_Args {
  JFM_PJRT_ARGS(Buffer_DonateWithControlDependency);
  PJRT_Buffer* buffer;
  void* callback_data;
  void* dependency_ready_callback;
  PJRT_Buffer* out_buffer;
};
struct PJRT_Buffer_CopyRawToHost_Args {  // since 0.58 or so; more members follow
  JFM_PJRT_ARGS(Buffer_CopyRawToHost);
  PJRT_Buffer* buffer;
};
struct PJRT_Buffer_CopyRawToHostFuture_Args {  // a recent slot; more members follow
  JFM_PJRT_ARGS(Buffer_CopyRawToHostFuture);
  PJRT_Buffer* buffer;
};
struct PJRT_Buffer_Bitcast_Args {  // a recent slot; more members follow
  JFM_PJRT_ARGS(Buffer_Bitcast);
  PJRT_Buffer* buffer;
};
#undef JFM_PJRT_ARGS

static_assert(sizeof(PJRT_Client_BufferFromHostBuffer_Args) == 120, "the API's layout");
static_assert(sizeof(PJRT_LoadedExecutable_Execute_Args) == 80, "the API's layout");
static_assert(sizeof(PJRT_Client_CreateAliasBuffer_Args) == 80, "the API's layout");
static_assert(sizeof(PJRT_Client_FulfillAliasBuffer_Args) == 64, "the API's layout");
static_assert(sizeof(PJRT_Client_CreateErrorBuffer_Args) == 96, "the API's layout");
static_assert(sizeof(PJRT_Client_CreateUninitializedBuffer_Args) == 80, "the API's layout");
static_assert(sizeof(PJRT_NamedValue) == 56, "the API's layout");
static_assert(offsetof(PJRT_ExecuteOptions, context) == 72, "the API's layout");

}  // namespace jfm::pjrt

// The one function that a plugin exports.
extern "C" const jfm::pjrt::PJRT_Api* GetPjrtApi();
