// The C ABI of the library: attention on its device or by its CPU kernels without JAX, for tests,
// tools, the Python package and other languages. Fixed-size C types only.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define JFM_ABI_VERSION 5
#define JFM_MAX_TENSOR_BATCH_DIMS 16

typedef enum { JFM_FLOAT32 = 0, JFM_FLOAT16 = 1, JFM_BFLOAT16 = 2 } JfmDtype;

// Bits of JfmAttentionProblem.operands, in the order of its members.
typedef enum {
  JFM_HAS_BIAS = 1 << 0,
  JFM_HAS_MASK = 1 << 1,
  JFM_HAS_Q_OFFSETS = 1 << 2,
  JFM_HAS_Q_SEGMENT_IDS = 1 << 3,  // with the next one
  JFM_HAS_KV_SEGMENT_IDS = 1 << 4,
  JFM_HAS_QUERY_SEQ_LENGTHS = 1 << 5,
  JFM_HAS_KEY_VALUE_SEQ_LENGTHS = 1 << 6,
  JFM_HAS_SINKS = 1 << 7,
  JFM_HAS_ALIBI_SLOPES = 1 << 8,
  JFM_HAS_DROPOUT_KEY = 1 << 9,  // with the next two and a dropout_rate
  JFM_HAS_DROPOUT_BATCH_INDICES = 1 << 10,
  JFM_HAS_DROPOUT_HEAD_INDICES = 1 << 11
} JfmOperand;

// The operand whose gradient jfm_attention_gradient computes.
typedef enum { JFM_OF_BIAS = 0, JFM_OF_SINKS = 1, JFM_OF_ALIBI_SLOPES = 2 } JfmGradientOf;

// What runs a problem: the Metal kernels on the library's device, or the CPU kernels.
typedef enum { JFM_METAL = 0, JFM_CPU = 1 } JfmBackend;

typedef enum { JFM_FORWARD = 0, JFM_BACKWARD = 1, JFM_GRADIENT = 2 } JfmPass;

// Strides in elements; a dimension without a stride is dense. Stride 0 = shared; of a
// gradient: summed.
typedef struct {
  void* data;  // may be null when size_bytes is 0
  int64_t size_bytes;
  int32_t num_batch_dims;  // that of the problem
  int32_t pad;
  int64_t batch_strides[JFM_MAX_TENSOR_BATCH_DIMS];
  int64_t head_stride;
  int64_t row_stride;
  int64_t col_stride;  // bias, mask and their gradient: between keys, 0 or 1
} JfmTensor;

// query [*batch, q_len, num_heads, head_dim], key [*batch, kv_len, num_kv_heads, head_dim],
// value [*batch, kv_len, num_kv_heads, value_head_dim], out like query with value_head_dim,
// logsumexp float32 [*batch, num_heads, q_len]. The d… tensors are like the tensors that
// they are the gradients of. What the options and the optional operands mean: docs/semantics.md.
typedef struct {
  int32_t dtype;  // JfmDtype
  int32_t num_batch_dims;
  int64_t batch_sizes[JFM_MAX_TENSOR_BATCH_DIMS];
  int64_t q_len, kv_len, num_heads, num_kv_heads, head_dim, value_head_dim;
  int64_t q_offset;                   // of all queries; not read if q_offsets is given
  int64_t window_left, window_right;  // inclusive; -1: no limit
  double dropout_rate;                // above 0 and below 1 with the dropout operands, else 0
  float scale;
  float logits_soft_cap;  // 0: none
  int32_t is_causal;      // 0 or 1
  int32_t operands;       // JfmOperand: which of the optional ones are given
  int32_t bias_dtype;     // JfmDtype
  int32_t gradient_of;    // JfmGradientOf
  int32_t backend;        // JfmBackend
  int32_t pad;
  JfmTensor query, key, value;
  // Optional. bias and mask (a byte each: 0 or 1) [*batch, num_heads, q_len, kv_len]; int32:
  // q_offsets [*batch], q_segment_ids [*batch, q_len], kv_segment_ids [*batch, kv_len],
  // query_seq_lengths and key_value_seq_lengths [*batch]; float32: sinks and alibi_slopes
  // [*batch, num_heads]; uint32: dropout_key [*batch, 2]; int32: dropout_batch_indices
  // [*batch], dropout_head_indices [*batch, num_heads].
  JfmTensor bias, mask, q_offsets, q_segment_ids, kv_segment_ids, query_seq_lengths,
      key_value_seq_lengths, sinks, alibi_slopes, dropout_key, dropout_batch_indices,
      dropout_head_indices;
  JfmTensor out, logsumexp;        // results of forward, inputs of the others
  JfmTensor dout, dlogsumexp;      // inputs of backward and gradient
  JfmTensor dquery, dkey, dvalue;  // results of backward
  JfmTensor gradient;              // result of gradient: like the operand that gradient_of names
} JfmAttentionProblem;

const char* jfm_version(void);
int jfm_abi_version(void);

// Runs and waits. 0, or an error code (the values of absl::StatusCode) with a message in
// `error`, cut to error_size bytes with the final zero; `error` may be null.
int jfm_attention_forward(const JfmAttentionProblem* problem, char* error, size_t error_size);
int jfm_attention_backward(const JfmAttentionProblem* problem, char* error, size_t error_size);
int jfm_attention_gradient(const JfmAttentionProblem* problem, char* error, size_t error_size);

// What a pass (JfmPass) would launch, as one line of JSON. Runs nothing; looks at no memory.
//   {"class": "…", "family": 9, "origin": "default", "form": "B",
//    "kernels": ["…", …], "num_launches": 7, "scratch_bytes": {"delta": 16, …},
//    "launches": [{"kernel": "…", "grid": [x, y, z], "threads": 128, "work": 1000000,
//                  "constants": [0, …], "buffers": [[index, "query", offset], …],
//                  "params": "…"}, …]}
// class: what measured choices go by. family: of the GPU, 0 = not known. origin: "measured" where
// such a choice was made. form of a backward pass: "A", "B", or of both passes "short"; or "".
// kernels: each once, in the order of their first launch. Of a launch: the threadgroups and the
// threads of each, an estimate of its floating-point operations, the values of the function
// constants by index, the operands by buffer index with offsets in elements, the bytes of
// AttentionParams in hexadecimal digits. The CPU kernels are one launch, of which only the kernel
// says something.
// Where that does not fit in text_size, error 11, and the line has "needed", a text_size that is
// enough, in place of "launches"; 4096 is enough for that. On another error `text` holds the
// message, cut to text_size like `error`.
int jfm_attention_plan(const JfmAttentionProblem* problem, int pass, char* text, size_t text_size);

// Gets the pipelines that the pass needs, compiled, and runs nothing; the CPU kernels need none.
// Errors as above.
int jfm_attention_compile(const JfmAttentionProblem* problem, int pass, char* error,
                          size_t error_size);

// What calls of a JfmBackend run on, as lines "key=value": device ("software", "apple" or "cpu"),
// name, family (of the CPU: its instruction set), system, num_cores, max_threadgroup_memory_bytes,
// max_threads_per_threadgroup, max_buffer_bytes, memory_limit_bytes, has_unified_memory (0 or
// 1). What is not known is 0 or empty. Where there is no device, an error code, and `text` says
// why.
int jfm_device_facts(int backend, char* text, size_t text_size);

// A hash of the kernels in this library: another text of them is another digest.
const char* jfm_kernel_digest(void);

// Where the device may keep compiled pipelines: a folder that need not exist yet. To be
// called before anything that uses the device; later it does nothing.
void jfm_set_cache_folder(const char* folder);

// Threads of the CPU kernels and the software device from now on, 0 = one per CPU that the
// process may use.
void jfm_set_threads(int num_threads);

// No launch has much more floating-point operations than this; 0 = the default.
void jfm_set_max_launch_work(double operations);

// Which kernels calls of a class take, as somebody measured, instead of what the library would
// take: replaces what was set before, for the process. A line
// "class<tab>pass<tab>form<tab>kernel[,kernel…]" each: pass is forward or backward, form A, B or
// - (no choice), and what is not among the kernels, of which there may be none, is the library's.
// An error names the line, and nothing is changed; "" = no choices.
int jfm_set_kernel_choices(const char* text, char* error, size_t error_size);

// Plans are made as on an Apple GPU of this family (9: "Apple9"); -1 = as the device says.
void jfm_set_gpu_family(int family);

// Form B keeps at most so many bytes of the score gradient at once, if that is enough for 128
// keys of one head; 0 = the device's own limit: at least 64 MiB, on a GPU 24 MiB per core up to
// 1/32 of its memory.
void jfm_set_score_gradient_limit(int64_t bytes);

// For tests and benchmarks of the CPU kernels. The instruction sets that this machine can run,
// a name per line, the best last; `text` as that of jfm_device_facts.
int jfm_cpu_isas(char* text, size_t text_size);
// Which of them to use from now on; "" = the best. An error code if there is no such one.
int jfm_cpu_set_isa(const char* name);
// The floating-point operations per second that one thread reaches in products of matrices in
// its first cache, of that JfmDtype; 0 if there is no such dtype.
double jfm_cpu_measure_peak(int dtype);

#ifdef __cplusplus
}
#endif
