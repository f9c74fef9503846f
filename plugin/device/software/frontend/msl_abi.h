// What compiled kernels and the runtime share: the entry point's argument and the calls
// a kernel makes. Read as C++ for OpenCL by msl_shim.h and as C++ by the runtime.
#pragma once

#ifdef __OPENCL_CPP_VERSION__
#define MSL_THREAD __private
#define MSL_THREADGROUP __local
#define MSL_CONSTANT __constant
// A rendezvous must stay where it is written, once.
#define MSL_RENDEZVOUS __attribute__((convergent, noduplicate))
#else
#define MSL_THREAD
#define MSL_THREADGROUP
#define MSL_CONSTANT
#define MSL_RENDEZVOUS
#endif

// Metal allows 31 buffers per kernel.
#define MSL_MAX_BUFFERS 31
#define MSL_SIMD_WIDTH 32
// Address of a buffer that a pipeline has not: in the page that is never mapped.
#define MSL_NO_BUFFER 64

struct MslSize {
  unsigned x, y, z;
};

// The threadgroup that is running.
struct MslGroup {
  struct MslSize position;  // of the threadgroup in the grid
  struct MslSize grid;      // in threadgroups
  struct MslSize threads;   // per threadgroup
  unsigned long buffers[MSL_MAX_BUFFERS];
};

struct MslThread {
  const MSL_THREAD struct MslGroup* group;
  struct MslSize position;  // in the threadgroup
  unsigned index;           // in the threadgroup
  unsigned simdgroup, lane;
};

// What the lanes of a simdgroup can meet for.
enum MslOperation {
  kMslShuffle,
  kMslShuffleXor,
  kMslShuffleDown,
  kMslShuffleUp,
  kMslShuffleRotate,
  kMslBroadcast,
  kMslSum,
  kMslProduct,
  kMslMax,
  kMslMin,
  kMslAnd,
  kMslOr,
  kMslXor,
  kMslPrefixSum,
  kMslBallot,
  kMslAny,
  kMslAll,
  kMslSimdgroupBarrier,
  kMslMatrixProduct,
};

// What a product writes to: the head of a float simdgroup_matrix.
struct MslAccumulator {
  float elements[2];
  unsigned pending;  // products that are yet to be added
};

extern "C" {

// Constant within a lane: a lane never leaves the worker that it started on.
// The function constants of the running pipeline, by index: a table, because a call for each
// would be made again in every loop whose conditions it may not move in front of.
__attribute__((const)) const MSL_THREAD int* __msl_function_constants(void);
__attribute__((const)) unsigned __msl_lane_index(void);

// The memory of a threadgroup variable, the same for all threads of a threadgroup.
// `id` tells the variables of a kernel apart.
MSL_THREADGROUP void* __msl_threadgroup_memory(unsigned id, unsigned long size,
                                               unsigned long alignment,
                                               const MSL_CONSTANT char* name);

// `flags` are those of metal::mem_flags.
MSL_RENDEZVOUS void __msl_threadgroup_barrier(unsigned flags);
MSL_RENDEZVOUS void __msl_simdgroup_barrier(unsigned flags);

// Gives the values of all lanes, one after the other, to each lane. They stay until the
// lane's next call but one.
MSL_RENDEZVOUS const MSL_THREAD void* __msl_exchange(const MSL_THREAD void* value, unsigned size,
                                                     unsigned operation);

// out += a * b, sometime before __msl_run_products() returns with out->pending == 0.
MSL_RENDEZVOUS void __msl_enqueue_product(MSL_THREAD struct MslAccumulator* out, float a0,
                                          float a1, float b0, float b1);
MSL_RENDEZVOUS void __msl_run_products(void);

#ifdef JFM_CHECKER
// Of the barrier that the lane calls next.
MSL_RENDEZVOUS void __msl_note_barrier_place(const MSL_CONSTANT char* file, int line);

// Elementary functions that the checker counts. Pure to the compiler, as those they stand
// for: it may call them as often as it would have called those.
#define MSL_PURE __attribute__((const))
MSL_PURE float __msl_exp(float);
MSL_PURE float __msl_exp2(float);
MSL_PURE float __msl_log(float);
MSL_PURE float __msl_log2(float);
MSL_PURE float __msl_tanh(float);
#undef MSL_PURE
#endif

}  // extern "C"
