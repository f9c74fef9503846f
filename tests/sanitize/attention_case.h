// Attention problems over memory of their own, to run in two ways and compare.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "plugin/attention/host_problem.h"
#include "plugin/attention/planner.h"
#include "plugin/cpu/attention.h"
#include "plugin/cpu/workers.h"
#include "tests/sanitize/driver.h"

namespace jfm {

struct Shape {
  Dtype dtype = Dtype::kFloat32;
  int64_t batch = 2, q_len = 37, kv_len = 53, num_heads = 6, num_kv_heads = 3;
  int64_t head_dim = 32, value_head_dim = 32;
  bool is_causal = false;
  bool has_features = false;  // all optional operands and options at once
};

// The tensors of all passes, dense, each in memory that starts `shift` bytes behind an
// aligned address; the operands hold numbers of about 1, or small ones that make sense.
class Attention {
 public:
  explicit Attention(const Shape& shape, size_t shift = 0) : shape_(shape), shift_(shift) {
    uint32_t state = 1;
    for (size_t i = 0; i < memory_.size(); ++i) {
      const size_t size_bytes = Bytes(i), width = ElementBytes(i);
      const TensorSpec spec = Spec(i);
      memory_[i].resize(size_bytes + 64 + shift_);
      char* const data = Data(i);
      for (size_t at = 0; at < size_bytes; at += width) {
        state = state * 1664525 + 1013904223;
        const uint32_t bits = Bits(spec, state);
        std::memcpy(data + at, &bits, width);
      }
    }
  }

  char* Data(size_t tensor) {
    char* start = memory_[tensor].data();
    return start + (64 - reinterpret_cast<uintptr_t>(start) % 64) % 64 + shift_;
  }

  size_t Bytes(size_t tensor) const {
    const AttentionProblem p = Sizes(tensor);
    const TensorSpec spec = Spec(tensor);
    int64_t count = shape_.batch;
    for (size_t i = 0; i < spec.num_dims; ++i) count *= spec.dims[i].Size(p);
    return static_cast<size_t>(count) * ElementBytes(tensor);
  }

  // Tensors of kTensors, and a gradient of each operand that can have one: numbers of memory.
  static size_t GradientMemory(GradientOf of) { return kGradientTensor + static_cast<size_t>(of); }

  // Its row; of a gradient, the row of the operand.
  TensorSpec Spec(size_t memory) const {
    return SpecOfTensor(std::min(memory, kGradientTensor), Sizes(memory));
  }

  // With strides, but no buffers.
  AttentionProblem Problem(GradientOf of = GradientOf::kBias) const {
    AttentionProblem p = Sizes(GradientMemory(of));
    for (size_t i = 0; i < kTensors.size(); ++i) {
      const TensorSpec spec = SpecOfTensor(i, p);
      TensorView& view = p.*spec.view;
      int64_t stride = 1;
      for (size_t d = spec.num_dims; d-- > 0;) {
        if (spec.dims[d].stride != nullptr) view.*spec.dims[d].stride = stride;
        stride *= spec.dims[d].Size(p);
      }
      view.batch_strides = {stride};
    }
    return p;
  }

  Status Run(Device& device, const Pass& pass, GradientOf of = GradientOf::kBias) {
    return RunOnDevice(device, pass, Host(pass, of));
  }
  // By the CPU kernels.
  Status Run(cpu::Workers& workers, const Pass& pass, GradientOf of = GradientOf::kBias) {
    const HostProblem host = Host(pass, of);
    return cpu::Run(pass, host, workers);
  }
  // All passes that there are.
  template <class DeviceOrWorkers>
  Status Run(DeviceOrWorkers& where) {
    Status status = Run(where, kForwardPass);
    if (status.ok()) status = Run(where, kBackwardPass);
    if (!shape_.has_features) return status;
    for (GradientOf of : {GradientOf::kBias, GradientOf::kSinks, GradientOf::kSlopes}) {
      if (status.ok()) status = Run(where, kGradientPass, of);
    }
    return status;
  }

  // Bit for bit.
  bool operator==(Attention& other) {
    for (size_t i = 0; i < memory_.size(); ++i) {
      if (std::memcmp(Data(i), other.Data(i), Bytes(i)) != 0) return false;
    }
    return true;
  }

 private:
  HostProblem Host(const Pass& pass, GradientOf of) {
    HostProblem host;
    host.problem = Problem(of);
    for (size_t i : pass.Tensors(host.problem)) {
      const size_t memory = i == kGradientTensor ? GradientMemory(of) : i;
      host.memory[i] = {Data(memory), static_cast<int64_t>(Bytes(memory))};
    }
    return host;
  }

  size_t ElementBytes(size_t memory) const {
    return static_cast<size_t>(SpecOf(Spec(memory).element, Sizes(memory)).size_bytes);
  }

  uint32_t Bits(const TensorSpec& spec, uint32_t random) const {
    const uint32_t sign = random >> 31, digits = random >> 8;
    switch (spec.element) {
      case Element::kUint32:
        return random;
      case Element::kBool:
        return digits % 4 != 0;
      case Element::kInt32: {
        const bool is_length = spec.view == &AttentionProblem::query_seq_lengths ||
                               spec.view == &AttentionProblem::key_value_seq_lengths;
        return (is_length ? static_cast<uint32_t>(shape_.q_len) - 2 : 0) + digits % 2;
      }
      default:
        break;
    }
    // Numbers in [0.5, 1), of either sign.
    const Dtype dtype = spec.element == Element::kFloat32 ? Dtype::kFloat32 : shape_.dtype;
    return dtype == Dtype::kFloat32   ? sign << 31 | 0x3f000000 | (digits & 0x7fffff)
           : dtype == Dtype::kFloat16 ? sign << 15 | 0x3800 | (digits & 0x3ff)
                                      : sign << 15 | 0x3f00 | (digits & 0x7f);
  }

  AttentionProblem Sizes(size_t memory) const {
    AttentionProblem p;
    p.dtype = p.bias_dtype = shape_.dtype;
    p.batch_sizes = {shape_.batch};
    p.q_len = shape_.q_len;
    p.kv_len = shape_.kv_len;
    p.num_heads = shape_.num_heads;
    p.num_kv_heads = shape_.num_kv_heads;
    p.head_dim = shape_.head_dim;
    p.value_head_dim = shape_.value_head_dim;
    p.scale = 0.25f;
    p.is_causal = shape_.is_causal;
    p.q_offset = shape_.kv_len - shape_.q_len;
    if (shape_.has_features) {
      SetGiven(p, (1 << kNumOptional) - 1);
      p.window_left = std::max<int64_t>(shape_.kv_len - 5, 0);
      p.logits_soft_cap = 3;
      p.dropout_rate = 0.25;
    }
    if (memory > kGradientTensor) {
      p.gradient_of = static_cast<GradientOf>(memory - kGradientTensor);
    }
    return p;
  }

  Shape shape_;
  size_t shift_;
  std::array<std::vector<char>, kTensors.size() + 2> memory_;
};

}  // namespace jfm
