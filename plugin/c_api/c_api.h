// The C ABI of the library: attention on its device without JAX, for tests, tools, the
// Python package and other languages. Fixed-size C types only.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define JFM_ABI_VERSION 2
#define JFM_MAX_TENSOR_BATCH_DIMS 16

typedef enum { JFM_FLOAT32 = 0, JFM_FLOAT16 = 1, JFM_BFLOAT16 = 2 } JfmDtype;

// Strides in elements; the last dimension is dense. Batch stride 0 = shared.
typedef struct {
  void* data;  // may be null when size_bytes is 0
  int64_t size_bytes;
  int32_t num_batch_dims;  // that of the problem
  int32_t pad;
  int64_t batch_strides[JFM_MAX_TENSOR_BATCH_DIMS];
  int64_t head_stride;
  int64_t row_stride;
} JfmTensor;

// query [*batch, q_len, num_heads, head_dim], key [*batch, kv_len, num_kv_heads, head_dim],
// value [*batch, kv_len, num_kv_heads, value_head_dim], out like query with value_head_dim,
// logsumexp float32 [*batch, num_heads, q_len]. The d… tensors are like the tensors that
// they are the gradients of.
typedef struct {
  int32_t dtype;  // JfmDtype
  int32_t num_batch_dims;
  int64_t batch_sizes[JFM_MAX_TENSOR_BATCH_DIMS];
  int64_t q_len, kv_len, num_heads, num_kv_heads, head_dim, value_head_dim;
  int64_t q_offset;  // query i sees key j iff j <= i + q_offset (is_causal)
  float scale;
  int32_t is_causal;            // 0 or 1
  JfmTensor query, key, value;  // inputs
  JfmTensor out, logsumexp;     // results of forward, inputs of backward
  JfmTensor dout, dlogsumexp;   // the rest: backward only
  JfmTensor dquery, dkey, dvalue;
} JfmAttentionProblem;

const char* jfm_version(void);
int jfm_abi_version(void);

// Runs and waits. 0, or an error code (the values of absl::StatusCode) with a message in
// `error`, cut to error_size bytes with the final zero; `error` may be null.
int jfm_attention_forward(const JfmAttentionProblem* problem, char* error, size_t error_size);
int jfm_attention_backward(const JfmAttentionProblem* problem, char* error, size_t error_size);

// The kernels that the forward or backward pass would launch, each once, a name per line in
// the order of their first launch. Runs nothing. On an error `text` holds the message; cut to
// text_size like `error`.
int jfm_attention_kernels(const JfmAttentionProblem* problem, int backward, char* text,
                          size_t text_size);

// How many launches the pass would make; -1 where jfm_attention_kernels has an error.
int64_t jfm_attention_num_launches(const JfmAttentionProblem* problem, int backward);

// Gets the pipelines that the pass needs, compiled, and runs nothing. Errors as above.
int jfm_attention_compile(const JfmAttentionProblem* problem, int backward, char* error,
                          size_t error_size);

// The device that calls run on, as lines "key=value": device ("software" or "apple"), name,
// family, system, num_cores, max_threadgroup_memory_bytes, max_threads_per_threadgroup,
// max_buffer_bytes, memory_limit_bytes, has_unified_memory (0 or 1). What is not known is 0
// or empty. Where there is no device, an error code, and `text` says why.
int jfm_device_facts(char* text, size_t text_size);

// A hash of the kernels in this library: another text of them is another digest.
const char* jfm_kernel_digest(void);

// Where the device may keep compiled pipelines: a folder that need not exist yet. To be
// called before anything that uses the device; later it does nothing.
void jfm_set_cache_folder(const char* folder);

// Threads of the software device from now on, 0 = one per CPU that the process may use. On
// other devices it does nothing.
void jfm_set_threads(int num_threads);

// No launch has much more floating-point operations than this; 0 = the default.
void jfm_set_max_launch_work(double operations);

#ifdef __cplusplus
}
#endif
