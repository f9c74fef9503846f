// The part of XLA's FFI C ABI (version 0.1) that our handlers use, written for this
// project: one binary then serves every jaxlib from 0.4.34 on, which jaxlib's own
// headers do not give. Not here: everything else, and any API slot after the 12th.
//
// Enumerations travel as int32_t, because a newer caller may send values that we do
// not know. XLA's structs start with their size and grow only at the end.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

constexpr int32_t kXlaFfiApiMajor = 0;
constexpr int32_t kXlaFfiApiMinor = 1;

// -- Extensions ---------------------------------------------------------------------

struct XLA_FFI_Extension {
  size_t struct_size;
  int32_t type;
  XLA_FFI_Extension* next;
};
constexpr int32_t kXlaFfiExtensionMetadata = 1;

struct XLA_FFI_Version {
  size_t struct_size;
  XLA_FFI_Extension* extensions;
  int32_t major;
  int32_t minor;
};

// The caller asks for these before it runs a handler for the first time. Newer
// versions have more members after `traits`, which a 0.1 handler leaves alone.
struct XLA_FFI_Metadata {
  size_t struct_size;
  XLA_FFI_Version api_version;
  uint32_t traits;
};

struct XLA_FFI_MetadataExtension {
  XLA_FFI_Extension base;
  XLA_FFI_Metadata* metadata;
};

// -- Errors -------------------------------------------------------------------------

struct XLA_FFI_Error;  // owned by XLA

struct XLA_FFI_ErrorCreateArgs {
  size_t struct_size;
  XLA_FFI_Extension* extensions;
  const char* message;
  int32_t code;  // jfm::Code has the same values
};

struct XLA_FFI_ErrorDestroyArgs {
  size_t struct_size;
  XLA_FFI_Extension* extensions;
  XLA_FFI_Error* error;
};

// -- Threads ------------------------------------------------------------------------

struct XLA_FFI_ThreadPoolScheduleArgs {
  size_t struct_size;
  XLA_FFI_Extension* extensions;
  void* context;  // that of the call frame
  void (*task)(void* data);
  void* data;
};

// -- The table of XLA's functions ---------------------------------------------------

// In API 0.1 and in every later one so far, the slots that are named here have the same places.
struct XLA_FFI_Api {
  size_t struct_size;
  XLA_FFI_Extension* extensions;
  XLA_FFI_Version api_version;
  const void* internal;
  XLA_FFI_Error* (*error_create)(XLA_FFI_ErrorCreateArgs*);
  void* error_get_message;
  void (*error_destroy)(XLA_FFI_ErrorDestroyArgs*);
  void* unused_slots[8];
  XLA_FFI_Error* (*thread_pool_schedule)(XLA_FFI_ThreadPoolScheduleArgs*);
};

// -- Values -------------------------------------------------------------------------

// xla::PrimitiveType. Only the types that have a name in our messages.
enum XLA_FFI_DataType : int32_t {
  XLA_FFI_PRED = 1,
  XLA_FFI_S8 = 2,
  XLA_FFI_S16 = 3,
  XLA_FFI_S32 = 4,
  XLA_FFI_S64 = 5,
  XLA_FFI_U8 = 6,
  XLA_FFI_U16 = 7,
  XLA_FFI_U32 = 8,
  XLA_FFI_U64 = 9,
  XLA_FFI_F16 = 10,
  XLA_FFI_F32 = 11,
  XLA_FFI_F64 = 12,
  XLA_FFI_C64 = 15,
  XLA_FFI_BF16 = 16,
  XLA_FFI_C128 = 18,
};

struct XLA_FFI_Buffer {
  size_t struct_size;
  XLA_FFI_Extension* extensions;
  int32_t dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};
constexpr int32_t kXlaFfiBuffer = 1;  // the only type of argument and of result

struct XLA_FFI_ByteSpan {
  const char* data;
  size_t size;
};

struct XLA_FFI_Scalar {
  int32_t dtype;
  void* value;
};

struct XLA_FFI_Array {
  int32_t dtype;
  size_t size;
  void* data;
};

enum XLA_FFI_AttributeType : int32_t {
  XLA_FFI_ARRAY = 1,       // attribute points to XLA_FFI_Array
  XLA_FFI_DICTIONARY = 2,  // to XLA_FFI_Attributes
  XLA_FFI_SCALAR = 3,      // to XLA_FFI_Scalar
  XLA_FFI_STRING = 4,      // to XLA_FFI_ByteSpan
};

// -- Call frame ---------------------------------------------------------------------

// Arguments or results: both have this layout.
struct XLA_FFI_Values {
  size_t struct_size;
  XLA_FFI_Extension* extensions;
  int64_t size;
  int32_t* types;
  void** values;
};

struct XLA_FFI_Attributes {
  size_t struct_size;
  XLA_FFI_Extension* extensions;
  int64_t size;
  int32_t* types;
  XLA_FFI_ByteSpan** names;
  void** values;
};

enum XLA_FFI_Stage : int32_t {
  XLA_FFI_INSTANTIATE = 0,
  XLA_FFI_PREPARE = 1,
  XLA_FFI_INITIALIZE = 2,
  XLA_FFI_EXECUTE = 3,
};

struct XLA_FFI_CallFrame {
  size_t struct_size;
  XLA_FFI_Extension* extensions;
  const XLA_FFI_Api* api;
  void* context;
  int32_t stage;
  XLA_FFI_Values arguments;
  XLA_FFI_Values results;
  XLA_FFI_Attributes attributes;
};

}  // extern "C"

// The size that XLA gives a struct: up to its last member, without padding after it.
#define XLA_FFI_SIZE(Struct, last_member) \
  (offsetof(Struct, last_member) + sizeof(Struct::last_member))

static_assert(sizeof(void*) == 8, "the offsets below are those of 64-bit platforms");
static_assert(offsetof(XLA_FFI_Api, error_create) == 48, "XLA's layout");
static_assert(offsetof(XLA_FFI_Api, error_destroy) == 48 + 2 * 8, "XLA's layout");
static_assert(XLA_FFI_SIZE(XLA_FFI_Api, thread_pool_schedule) == 48 + 12 * 8, "XLA's layout");
static_assert(XLA_FFI_SIZE(XLA_FFI_ErrorDestroyArgs, error) == 24, "XLA's layout");
static_assert(XLA_FFI_SIZE(XLA_FFI_ThreadPoolScheduleArgs, data) == 40, "XLA's layout");
static_assert(XLA_FFI_SIZE(XLA_FFI_ErrorCreateArgs, code) == 28, "XLA's layout");
static_assert(XLA_FFI_SIZE(XLA_FFI_Metadata, traits) == 36, "XLA's layout");
static_assert(offsetof(XLA_FFI_MetadataExtension, metadata) == 24, "XLA's layout");
static_assert(sizeof(XLA_FFI_Buffer) == 48, "XLA's layout");
static_assert(offsetof(XLA_FFI_CallFrame, arguments) == 40, "XLA's layout");
static_assert(offsetof(XLA_FFI_CallFrame, results) == 80, "XLA's layout");
static_assert(offsetof(XLA_FFI_CallFrame, attributes) == 120, "XLA's layout");
static_assert(XLA_FFI_SIZE(XLA_FFI_CallFrame, attributes) == 168, "XLA's layout");
