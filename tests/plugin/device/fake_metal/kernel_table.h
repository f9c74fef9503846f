// What the Metal compiler would know of each kernel: generated beside the table of software
// kernels, by tests/support/fake_metal.py, from the same translation.
#pragma once

#include <cstddef>

namespace fake {

struct KernelConstant {
  const char* name;
  unsigned index;
  unsigned type;  // MTLDataType
};

struct KernelBuffer {
  const char* name;
  unsigned index;
  unsigned alignment;  // of what it points to, in bytes
  size_t min_bytes;    // of a reference to a structure; otherwise 0
  int condition;       // index of the constant without which it does not exist; -1: none
};

struct KernelFacts {
  const char* host_name;
  const char* expression;  // "attention_forward<float,32,32,32,4>", or the function's name
  const KernelConstant* constants;
  size_t num_constants;
  const KernelBuffer* buffers;
  size_t num_buffers;
};

extern const KernelFacts kKernelFacts[];
extern const size_t kNumKernelFacts;

}  // namespace fake
