// Attention problems over memory of their own, to run on two devices and compare.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "plugin/attention/host_problem.h"
#include "plugin/attention/planner.h"
#include "tests/sanitize/driver.h"

namespace jfm {

struct Shape {
  Dtype dtype = Dtype::kFloat32;
  int64_t batch = 2, q_len = 37, kv_len = 53, num_heads = 6, num_kv_heads = 3;
  int64_t head_dim = 32, value_head_dim = 32;
  bool is_causal = false;
};

// The ten tensors of both passes, dense, each in memory that starts `shift` bytes behind an
// aligned address; the operands hold numbers of about 1.
class Attention {
 public:
  explicit Attention(const Shape& shape, size_t shift = 0) : shape_(shape), shift_(shift) {
    uint32_t state = 1;
    for (size_t i = 0; i < kTensors.size(); ++i) {
      memory_[i].resize(Bytes(i) + 64 + shift_);
      const bool is_float = kTensors[i].is_statistic() || shape_.dtype == Dtype::kFloat32;
      const size_t width = is_float ? 4 : 2;
      for (size_t at = 0; at < Bytes(i); at += width) {
        state = state * 1664525 + 1013904223;  // numbers in [0.5, 1), of either sign
        const uint32_t sign = state >> 31, digits = state >> 8;
        const uint32_t bits = is_float ? sign << 31 | 0x3f000000 | (digits & 0x7fffff)
                              : shape_.dtype == Dtype::kFloat16
                                  ? sign << 15 | 0x3800 | (digits & 0x3ff)
                                  : sign << 15 | 0x3f00 | (digits & 0x7f);
        std::memcpy(Data(i) + at, &bits, width);
      }
    }
  }

  char* Data(size_t tensor) {
    char* start = memory_[tensor].data();
    return start + (64 - reinterpret_cast<uintptr_t>(start) % 64) % 64 + shift_;
  }

  size_t Bytes(size_t tensor) const {
    const TensorSpec& spec = kTensors[tensor];
    const AttentionProblem p = Sizes();
    const int64_t rows = shape_.batch * p.*spec.rows * p.*spec.heads;
    return static_cast<size_t>(
        spec.is_statistic() ? rows * 4 : rows * p.*spec.width * SizeBytes(shape_.dtype));
  }

  // With strides, but no buffers.
  AttentionProblem Problem() const {
    AttentionProblem p = Sizes();
    for (const TensorSpec& spec : kTensors) {
      TensorView& view = p.*spec.view;
      const int64_t rows = p.*spec.rows, heads = p.*spec.heads;
      view.row_stride = spec.is_statistic() ? 1 : heads * p.*spec.width;
      view.head_stride = spec.is_statistic() ? rows : p.*spec.width;
      view.batch_strides = {rows * heads * (spec.is_statistic() ? 1 : p.*spec.width)};
    }
    return p;
  }

  Status Run(Device& device, const Pass& pass) {
    HostProblem host;
    host.problem = Problem();
    for (size_t i = 0; i < pass.num_tensors; ++i) {
      host.memory[i] = {Data(i), static_cast<int64_t>(Bytes(i))};
    }
    return RunOnHost(device, pass, std::move(host));
  }
  Status Run(Device& device) {
    Status status = Run(device, kForwardPass);
    return status.ok() ? Run(device, kBackwardPass) : status;
  }

  // Bit for bit.
  bool operator==(Attention& other) {
    for (size_t i = 0; i < kTensors.size(); ++i) {
      if (std::memcmp(Data(i), other.Data(i), Bytes(i)) != 0) return false;
    }
    return true;
  }

 private:
  AttentionProblem Sizes() const {
    AttentionProblem p;
    p.dtype = shape_.dtype;
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
    return p;
  }

  Shape shape_;
  size_t shift_;
  std::array<std::vector<char>, kTensors.size()> memory_;
};

}  // namespace jfm
