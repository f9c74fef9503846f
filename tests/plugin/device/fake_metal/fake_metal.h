// What tests ask of the fake Objective-C runtime and the fake Metal beside it: broken
// calls, limits, counts of objects and what it found wrong. Plain C, for ctypes as well.
//
// The fake is a judge: it knows Apple's rules, not our layer. A broken rule is a fault,
// and a fault ends the process with "Metal API misuse: ..." or "unrecognized selector
// -[Class selector]" on stderr, as Metal's validation layer does; see set_abort.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// ---- Buffers of the default device, as a host has them -------------------------------

// A new id<MTLBuffer>, one reference for the caller. Null if bytes is 0 or over the limit.
void* fake_metal_new_buffer(size_t bytes, int private_storage);
// Its memory, whatever the storage mode; null if it is not a live buffer.
void* fake_metal_buffer_bytes(void* buffer);
size_t fake_metal_buffer_length(void* buffer);
int fake_metal_is_alive_buffer(void* object);
// Of any object. Need no autorelease pool.
void fake_metal_retain(void* object);
void fake_metal_release(void* object);
// References that clients hold: +1 from new... and retain, autoreleased ones included; those
// that Metal's own objects hold are not counted. -1 if it is not a live object.
int64_t fake_metal_references(void* object);

// What new memory is filled with: a NaN in every float type.
enum { FAKE_METAL_POISON = 0xFF };

// ---- Objects -------------------------------------------------------------------------

// Without classes, selectors and the default device. Copied blocks count as objects.
int64_t fake_metal_live_objects(void);
// "MTLBuffer x 2, NSString x 1"; valid until this thread's next call.
const char* fake_metal_live_text(void);
// References to the default device that clients hold: MTLCreateSystemDefaultDevice gives one.
int64_t fake_metal_device_references(void);

// ---- Calls ---------------------------------------------------------------------------

// How often it was sent to an object or class, null receivers not counted.
int64_t fake_metal_calls(const char* selector);
int64_t fake_metal_nil_calls(const char* selector);
// Pipelines that were compiled, and those that a binary archive had.
int64_t fake_metal_compiled_pipelines(void);
int64_t fake_metal_archived_pipelines(void);

enum {
  FAKE_METAL_ERROR = 0,              // nil (or NO, or 0), with an NSError where the method has one
  FAKE_METAL_NIL = 1,                // nil without an NSError
  FAKE_METAL_RUN_ERROR = 2,          // of "commit": ends with status error, internal error (1)
  FAKE_METAL_RUN_TIMEOUT = 3,        // the same, MTLCommandBufferErrorTimeout (2)
  FAKE_METAL_RUN_OUT_OF_MEMORY = 4,  // the same, MTLCommandBufferErrorOutOfMemory (8)
  FAKE_METAL_RUN_PAGE_FAULT = 5,     // the same, MTLCommandBufferErrorPageFault (3)
  FAKE_METAL_RUN_NO_ERROR = 6,       // status error, but [commandBuffer error] is nil
  FAKE_METAL_WARNING = 7,            // succeeds, and sets an NSError all the same
  FAKE_METAL_RUN_REVOKED = 8,        // as RUN_ERROR, MTLCommandBufferErrorAccessRevoked (4)
  FAKE_METAL_EMPTY_ALIAS = 9,        // of newBufferWithBytesNoCopy...: a buffer of length 0
  FAKE_METAL_FALSE_ALIAS = 10,       // of the same: a buffer of other memory
  FAKE_METAL_WRAPPED_DEVICE = 11,    // of "device": another object, with the registryID
  FAKE_METAL_OTHER_DEVICE = 12       // of the same: another object, with another registryID
};
// After `skip` more calls of this selector, the next `count` fail so; `message` is the error's
// localizedDescription. Several for one selector are worked off in turn. A failed command
// buffer leaves its results untouched.
void fake_metal_fail(const char* selector, int skip, int count, int mode, const char* message);
void fake_metal_clear_failures(void);

// ---- Faults --------------------------------------------------------------------------

// 1 (the default): a fault ends the process. 0: it is noted, and the method does nothing and
// returns 0.
void fake_metal_set_abort(int yes);
// One a line, in order; valid until this thread's next call. "" if there are none.
const char* fake_metal_faults(void);
void fake_metal_clear_faults(void);

// ---- The device ----------------------------------------------------------------------

// newBuffer... beyond it gives nil; NoCopy takes none of it. 0: no limit.
void fake_metal_set_memory_limit(size_t bytes);
// Known names, with what they are at first:
//   has_device 1, family 1009 (the newest MTLGPUFamilyApple), hasUnifiedMemory 1,
//   maxThreadgroupMemoryLength 32768, maxBufferLength 2^33, recommendedMaxWorkingSetSize 2^34,
//   threadExecutionWidth 32, maxTotalThreadsPerThreadgroup 1024,
//   staticThreadgroupMemoryLength 0 (of every pipeline: the fake cannot tell),
//   maxCommandBufferCount 64 (of a new queue),
//   has_gpu_service 1 (IOKit finds the GPU), gpu_core_count 10 (0: IOKit does not tell; -1: it
//   tells it by an object that is no number)
// A buffer longer than maxBufferLength is a fault: ask first. Unknown names end the process.
void fake_metal_set_fact(const char* name, int64_t value);
// name "Apple M3 Fake", operatingSystemVersionString "Version 14.6 (Build 23G80)"
void fake_metal_set_text(const char* name, const char* value);
// Facts, texts, memory limit, hold, failures and abort as at the start.
void fake_metal_reset(void);

// While held, committed command buffers do not start; memory changes only afterwards.
void fake_metal_hold(int yes);
// Returns when every committed command buffer has ended and its handlers have returned.
void fake_metal_drain(void);

#ifdef __cplusplus
}  // extern "C"
#endif
