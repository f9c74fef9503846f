// The C ABI of the library: attention on the software Metal device without JAX, for
// tests, tools and other languages. Fixed-size C types only.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define JFM_ABI_VERSION 1
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

// The kernels that the forward or backward pass would launch, a name per line in order.
// Runs nothing. On an error `text` holds the message; cut to text_size like `error`.
int jfm_attention_kernels(const JfmAttentionProblem* problem, int backward, char* text,
                          size_t text_size);

// Threads of the software device from now on; 0 = one per CPU that the process may use.
void jfm_set_threads(int num_threads);

#ifdef __cplusplus
}
#endif
