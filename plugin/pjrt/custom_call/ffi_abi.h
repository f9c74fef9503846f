// XLA's side of the FFI C ABI, versions 0.1 to 0.5: the tables of functions that handlers
// are given, and the arguments of each. The handlers' side is in plugin/ffi/xla_ffi.h.
//
// The table is not append-only: 0.1 got ThreadPool_NumThreads in front of the futures
// without a new number. Every argument struct starts with its size, which tells apart
// what came to share a slot, and which layout the caller means.
#pragma once

#include "plugin/ffi/xla_ffi.h"

extern "C" {

struct XLA_FFI_Future;
struct XLA_FFI_ExecutionContext;  // "InvokeContext" since 0.5

constexpr int32_t kXlaFfiNewestMinor = 5;

// What follows XLA_FFI_CallFrame's first members; its size does not count this one.
struct XLA_FFI_CallFrameWithFuture {
  XLA_FFI_CallFrame frame;
  XLA_FFI_Future* future;  // set by an asynchronous handler
};

struct XLA_FFI_MetadataWithState {
  XLA_FFI_Metadata metadata;
  int64_t state_type_id;  // since 0.2; not counted either
};

// Functions take a pointer to their arguments; most return an XLA_FFI_Error*.
using XLA_FFI_Function = void (*)();

// Slots in the order of 0.5. The first 12 are the same everywhere; in the first 0.1
// (jaxlib 0.4.34) the three of futures follow directly.
enum XLA_FFI_Slot : int {
  XLA_FFI_ERROR_CREATE,
  XLA_FFI_ERROR_GET_MESSAGE,  // with the code since 0.5
  XLA_FFI_ERROR_DESTROY,
  XLA_FFI_HANDLER_REGISTER,
  XLA_FFI_STREAM_GET,
  XLA_FFI_TYPE_REGISTER,
  XLA_FFI_CONTEXT_GET,
  XLA_FFI_STATE_SET,
  XLA_FFI_STATE_GET,
  XLA_FFI_DEVICE_MEMORY_ALLOCATE,
  XLA_FFI_DEVICE_MEMORY_FREE,
  XLA_FFI_THREAD_POOL_SCHEDULE,
  XLA_FFI_THREAD_POOL_NUM_THREADS,
  XLA_FFI_FUTURE_CREATE,
  XLA_FFI_FUTURE_SET_AVAILABLE,
  XLA_FFI_FUTURE_SET_ERROR,
  XLA_FFI_RUN_ID_GET,
  XLA_FFI_DEVICE_ORDINAL_GET,
  XLA_FFI_CONTEXT_FIND_EXTENSION,
  XLA_FFI_CUSTOM_OPTIONS_GET,
  XLA_FFI_NUM_SLOTS,
};

// XLA_FFI_Api as its callers see it, with all slots.
struct XLA_FFI_ApiTable {
  size_t struct_size;
  XLA_FFI_Extension* extensions;
  XLA_FFI_Version api_version;
  const void* internal;
  XLA_FFI_Function slots[XLA_FFI_NUM_SLOTS];
};

struct XLA_FFI_ArgsHeader {
  size_t struct_size;
  XLA_FFI_Extension* extensions;
};

struct XLA_FFI_ErrorArgs {  // Error_GetMessage, Error_GetDetails and Error_Destroy
  XLA_FFI_ArgsHeader header;
  XLA_FFI_Error* error;
  const char* message;  // out; not of Error_Destroy
  int32_t code;         // out; of Error_GetDetails
};

struct XLA_FFI_Bundle {
  void* instantiate;
  void* prepare;
  void* initialize;
  void* execute;
};

struct XLA_FFI_HandlerRegisterArgs {
  XLA_FFI_ArgsHeader header;
  XLA_FFI_ByteSpan name;
  XLA_FFI_ByteSpan platform;
  XLA_FFI_Bundle bundle;
  uint32_t traits;
};

struct XLA_FFI_HandlerRegisterArgs5 {  // since 0.5
  XLA_FFI_ArgsHeader header;
  XLA_FFI_ByteSpan name;
  XLA_FFI_ByteSpan platform;
  XLA_FFI_Bundle bundle;
  void* record;
  uint32_t traits;
};

struct XLA_FFI_TypeInfo {
  XLA_FFI_ArgsHeader header;
  void (*deleter)(void* object);
};

struct XLA_FFI_TypeRegisterArgs {
  XLA_FFI_ArgsHeader header;
  XLA_FFI_ByteSpan name;
  int64_t* type_id;                   // in and out
  const XLA_FFI_TypeInfo* type_info;  // since 0.2, though the size never counts it
};

struct XLA_FFI_ContextGetArgs {
  XLA_FFI_ArgsHeader header;
  XLA_FFI_ExecutionContext* context;
  const int64_t* type_id;
  void* data;  // out
};

struct XLA_FFI_StateArgs1 {  // State_Get and State_Set of 0.1 and 0.2
  XLA_FFI_ArgsHeader header;
  XLA_FFI_ExecutionContext* context;
  const int64_t* type_id;
  void* state;
  void (*deleter)(void* state);  // State_Set of 0.1 only
};

struct XLA_FFI_StateArgs3 {  // since 0.3
  XLA_FFI_ArgsHeader header;
  XLA_FFI_ExecutionContext* context;
  int32_t stage;
  const int64_t* type_id;
  void* state;
};

struct XLA_FFI_StreamGetArgs {
  XLA_FFI_ArgsHeader header;
  XLA_FFI_ExecutionContext* context;
  void* stream;  // out
};

struct XLA_FFI_AllocateArgs {
  XLA_FFI_ArgsHeader header;
  XLA_FFI_ExecutionContext* context;
  size_t size;
  size_t alignment;
  void* data;  // out
};

struct XLA_FFI_FreeArgs {
  XLA_FFI_ArgsHeader header;
  XLA_FFI_ExecutionContext* context;
  size_t size;
  void* data;
};

struct XLA_FFI_ScheduleArgs {
  XLA_FFI_ArgsHeader header;
  XLA_FFI_ExecutionContext* context;
  void (*task)(void* data);
  void* data;
};

struct XLA_FFI_NumThreadsArgs {
  XLA_FFI_ArgsHeader header;
  XLA_FFI_ExecutionContext* context;
  int64_t* num_threads;  // out
};

struct XLA_FFI_FutureArgs {  // Future_Create (out), SetAvailable and SetError
  XLA_FFI_ArgsHeader header;
  XLA_FFI_Future* future;
  XLA_FFI_Error* error;  // of SetError, which takes it over
};

struct XLA_FFI_RunIdArgs {
  XLA_FFI_ArgsHeader header;
  XLA_FFI_ExecutionContext* context;
  int64_t run_id;  // out
};

struct XLA_FFI_DeviceOrdinalArgs {
  XLA_FFI_ArgsHeader header;
  XLA_FFI_ExecutionContext* context;
  int32_t device_ordinal;  // out
};

struct XLA_FFI_FindExtensionArgs {
  XLA_FFI_ArgsHeader header;
  XLA_FFI_ExecutionContext* context;
  int64_t extension_type;
  const void* extension;  // out
};

struct XLA_FFI_CustomOptionsArgs {
  XLA_FFI_ArgsHeader header;
  XLA_FFI_ExecutionContext* context;
  const XLA_FFI_Attributes* options;  // out
};

}  // extern "C"

static_assert(offsetof(XLA_FFI_CallFrameWithFuture, future) == 168, "XLA's layout");
static_assert(offsetof(XLA_FFI_MetadataWithState, state_type_id) == 40, "XLA's layout");
static_assert(offsetof(XLA_FFI_ApiTable, slots) == 48, "XLA's layout");
static_assert(sizeof(XLA_FFI_ApiTable) == 208, "XLA's size in 0.5");
static_assert(XLA_FFI_SIZE(XLA_FFI_ErrorArgs, code) == 36, "XLA's layout");
static_assert(XLA_FFI_SIZE(XLA_FFI_HandlerRegisterArgs, traits) == 84, "XLA's layout");
static_assert(XLA_FFI_SIZE(XLA_FFI_HandlerRegisterArgs5, traits) == 92, "XLA's layout");
static_assert(offsetof(XLA_FFI_TypeRegisterArgs, type_info) == 40, "XLA's layout");
static_assert(offsetof(XLA_FFI_StateArgs1, deleter) == 40, "XLA's layout");
static_assert(sizeof(XLA_FFI_StateArgs3) == 48, "XLA's layout");
static_assert(sizeof(XLA_FFI_AllocateArgs) == 48, "XLA's layout");
static_assert(sizeof(XLA_FFI_FutureArgs) == 32, "XLA's layout");
