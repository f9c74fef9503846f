// The C ABI between the Python package and the plugin: what Python sets before JAX loads
// GetPjrtApi(), and how it answers the plugin's question about a program.
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// Asked for every program that may have custom calls, on whatever thread compiles it.
// Must call jfm_pjrt_reply(sink, ...) exactly once before it returns.
typedef void (*JfmPartitionFunction)(const char* program, size_t program_size, const char* options,
                                     size_t options_size, void* sink);

typedef enum {
  JFM_REPLY_UNCHANGED = 0,  // the host compiles the program as it is
  JFM_REPLY_REWRITTEN = 1,  // the host compiles `data` instead
  JFM_REPLY_PLAN = 2,       // `data` is a plan in the format of jax_flash_metal/plan.py
  JFM_REPLY_ERROR = 3,      // `data` is a message, `code` an absl::StatusCode
} JfmReplyKind;
void jfm_pjrt_reply(void* sink, int kind, int code, const char* data, size_t size);

enum {
  // The caller's jaxlib cannot parse the host's optimised HLO (jaxlib 0.4.34 with a new
  // host): hand out the program that was compiled instead.
  JFM_HIDE_OPTIMIZED_PROGRAM = 1,
};

// Loads the host's library. Once per process; again with the same arguments is fine.
// host_buffers: "auto", "address" or "copy". 0, or an error code with a message in `error`,
// cut to error_size.
int jfm_pjrt_configure(const char* host_path, const char* platform_name, const char* host_buffers,
                       int flags, JfmPartitionFunction partition, char* error, size_t error_size);

// What is known of the configured host, as lines "key=value": api_version, num_slots,
// old_host (0 or 1), stablehlo (the newest version that an old host reads, otherwise
// empty); once there is a client also platform_name and platform_version, as the host
// calls itself, and handover: how handlers get at its memory, "native" (objects of the
// device both ways, for handlers that take them), "address", "address+copy" (operands in
// place, results copied) or "copy". 0, or an error code when nothing is configured.
int jfm_pjrt_host_facts(char* text, size_t text_size);

// A typed XLA FFI handler; null for a stage that it has not. `api_version` and `traits` as
// jax.ffi.register_ffi_target passes them on.
int jfm_pjrt_register_handler(const char* name, size_t name_size, void* instantiate, void* prepare,
                              void* initialize, void* execute, int api_version, unsigned traits,
                              char* error, size_t error_size);

// An FFI type: `type_id` points to its int64 id (0: assigned here), `type_info` to an
// XLA_FFI_TypeInfo or is null. As jax.ffi.register_ffi_type gives them.
int jfm_pjrt_register_type(const char* name, size_t name_size, void* type_id, void* type_info,
                           char* error, size_t error_size);

// To be called before Python ends, without its lock: waits until the partition function
// has returned from all calls; it gets no more. In a forked child it does nothing.
void jfm_pjrt_stop_partitioning(void);

// For tests: asks the partition function about every program, also those without custom
// calls, so that it can put some in.
void jfm_pjrt_plan_every_program(int yes);

// The registered names, one per line in alphabetical order.
int jfm_pjrt_registered_targets(char* text, size_t text_size);

// Counters for tests and benchmarks since the process started, as lines "key=value":
// programs (plans loaded), segments (compiled), executions (of plans), calls (custom calls
// run), live_buffers (of running or pending plans).
int jfm_pjrt_statistics(char* text, size_t text_size);

#ifdef __cplusplus
}
#endif
