// Driver: attention on the software Metal device, through the C ABI and through our own
// FFI handlers as the plugin calls them; from many threads, bad calls too. The kernels
// themselves are not instrumented (the race checker is for them), the rest is.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "plugin/c_api/c_api.h"
#include "plugin/pjrt/custom_call/handler_registry.h"
#include "tests/sanitize/specs.h"

extern "C" {
void* jax_flash_metal_forward_v1(const void* frame);
void* jax_flash_metal_backward_v1(const void* frame);
}

namespace jfm::pjrt {
namespace {

constexpr int64_t kBatch = 2, kQLen = 37, kKvLen = 53, kHeads = 6, kKvHeads = 3, kDim = 32;

using Data = std::vector<float>;

Data Numbers(const std::vector<int64_t>& dims, int seed) {
  int64_t count = 1;
  for (int64_t size : dims) count *= size;
  Data values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = std::sin(static_cast<float>(i * 7 + seed));
  return values;
}

const std::vector<int64_t> kQuery = {kBatch, kQLen, kHeads, kDim};
const std::vector<int64_t> kKey = {kBatch, kKvLen, kKvHeads, kDim};
const std::vector<int64_t> kStatistic = {kBatch, kHeads, kQLen};

Attributes Options(bool is_causal) {
  return {{"version", Int(1)},
          {"scale", Float(0.25f)},
          {"is_causal", Scalar<uint8_t>(XLA_FFI_PRED, is_causal)},
          {"q_offset", Int(16)}};
}

CallSpec Forward(bool is_causal) {
  return {"jax_flash_metal_forward_v1",
          Options(is_causal),
          {Floats(kQuery), Floats(kKey), Floats(kKey)},
          {Floats(kQuery), Floats(kStatistic)}};
}
CallSpec Backward(bool is_causal) {
  return {"jax_flash_metal_backward_v1",
          Options(is_causal),
          {Floats(kQuery), Floats(kKey), Floats(kKey), Floats(kQuery), Floats(kStatistic),
           Floats(kQuery), Floats(kStatistic)},
          {Floats(kQuery), Floats(kKey), Floats(kKey)}};
}

struct Gradients {
  Data dquery, dkey, dvalue;
  bool operator==(const Gradients& other) const {
    return dquery == other.dquery && dkey == other.dkey && dvalue == other.dvalue;
  }
};

Gradients Step(const CustomCall& forward, const CustomCall& backward, int seed) {
  Data query = Numbers(kQuery, seed), key = Numbers(kKey, seed + 1),
       value = Numbers(kKey, seed + 2);
  Data out(query.size()), logsumexp(kBatch * kHeads * kQLen), dlogsumexp(logsumexp.size());
  CheckOk(forward.Execute({query.data(), key.data(), value.data()}, {out.data(), logsumexp.data()},
                          {}));
  Gradients gradients = {Data(query.size()), Data(key.size()), Data(key.size())};
  CheckOk(backward.Execute(
      {query.data(), key.data(), value.data(), out.data(), logsumexp.data(), out.data(),
       dlogsumexp.data()},
      {gradients.dquery.data(), gradients.dkey.data(), gradients.dvalue.data()}, {}));
  for (float element : gradients.dquery) CHECK(std::isfinite(element));
  return gradients;
}

void Calls() {
  for (auto* function : {&jax_flash_metal_forward_v1, &jax_flash_metal_backward_v1}) {
    HandlerStages stages;
    stages.execute = reinterpret_cast<void*>(function);
    CheckOk(RegisterHandler(function == &jax_flash_metal_forward_v1 ? "jax_flash_metal_forward_v1"
                                                                    : "jax_flash_metal_backward_v1",
                            stages));
  }
  for (bool is_causal : {false, true}) {
    const std::unique_ptr<CustomCall> forward = MakeCall(Forward(is_causal));
    const std::unique_ptr<CustomCall> backward = MakeCall(Backward(is_causal));
    const Gradients expected = Step(*forward, *backward, 1);
    InThreads(4, [&](int) { CHECK(Step(*forward, *backward, 1) == expected); });
  }
}

void BadCalls() {
  Data data(1 << 16);
  const auto fails = [&](const CallSpec& spec, const std::string& message) {
    const std::unique_ptr<CustomCall> call = MakeCall(spec);
    const std::vector<void*> operands(spec.operands.size(), data.data());
    const std::vector<void*> results(spec.results.size(), data.data());
    CheckError(call->Execute(operands, results, {}), Code::kInvalidArgument, message);
  };
  CallSpec spec = Forward(false);
  spec.operands.pop_back();
  fails(spec, "expected 3 operands");
  spec = Forward(false);
  spec.operands[1].dtype = XLA_FFI_S32;
  fails(spec, "key must be float32");
  spec = Forward(false);
  spec.operands[2].dims[1] = 5;
  fails(spec, "value must have the same kv_len");
  spec = Forward(false);
  spec.attributes[0].second = Int(99);
  fails(spec, "version");
  spec = Forward(false);
  spec.attributes.pop_back();
  fails(spec, "attribute");
}

// One problem of the C ABI over dense memory without batch dimensions.
struct Problem {
  Data query = Numbers({kQLen, kHeads, kDim}, 1), key = Numbers({kKvLen, kKvHeads, kDim}, 2);
  Data value = Numbers({kKvLen, kKvHeads, kDim}, 3), out = Data(query.size());
  Data logsumexp = Data(kHeads * kQLen), dlogsumexp = Data(kHeads * kQLen);
  Data dquery = Data(query.size()), dkey = Data(key.size()), dvalue = Data(value.size());
  JfmAttentionProblem c = {};

  static JfmTensor Tensor(Data& data, int64_t head_stride, int64_t row_stride) {
    JfmTensor tensor = {};
    tensor.data = data.data();
    tensor.size_bytes = static_cast<int64_t>(data.size() * sizeof(float));
    tensor.head_stride = head_stride;
    tensor.row_stride = row_stride;
    return tensor;
  }

  Problem() {
    c.q_len = kQLen;
    c.kv_len = kKvLen;
    c.num_heads = kHeads;
    c.num_kv_heads = kKvHeads;
    c.head_dim = c.value_head_dim = kDim;
    c.scale = 0.25f;
    c.is_causal = 1;
    c.q_offset = 16;
    c.query = Tensor(query, kDim, kHeads * kDim);
    c.key = Tensor(key, kDim, kKvHeads * kDim);
    c.value = Tensor(value, kDim, kKvHeads * kDim);
    c.out = c.dout = Tensor(out, kDim, kHeads * kDim);
    c.logsumexp = Tensor(logsumexp, kQLen, 1);
    c.dlogsumexp = Tensor(dlogsumexp, kQLen, 1);
    c.dquery = Tensor(dquery, kDim, kHeads * kDim);
    c.dkey = Tensor(dkey, kDim, kKvHeads * kDim);
    c.dvalue = Tensor(dvalue, kDim, kKvHeads * kDim);
  }
};

void CAbi() {
  char error[1024];
  for (int num_threads : {1, 3, 0}) {
    jfm_set_threads(num_threads);
    InThreads(3, [&](int) {
      Problem problem;
      char message[1024];
      const int forward = jfm_attention_forward(&problem.c, message, sizeof(message));
      if (forward != 0) std::fprintf(stderr, "%s\n", message);
      CHECK(forward == 0);
      const int backward = jfm_attention_backward(&problem.c, message, sizeof(message));
      if (backward != 0) std::fprintf(stderr, "%s\n", message);
      CHECK(backward == 0);
    });
  }
  Problem problem;
  CHECK(jfm_attention_kernels(&problem.c, 1, error, sizeof(error)) == 0);
  CHECK(std::strlen(error) > 0);
  problem.c.key.size_bytes = 4;
  CHECK(jfm_attention_forward(&problem.c, error, sizeof(error)) != 0);
  problem = Problem();
  problem.c.head_dim = 1000;
  CHECK(jfm_attention_forward(&problem.c, error, sizeof(error)) != 0);
  CHECK(jfm_attention_forward(&problem.c, nullptr, 0) != 0);
}

}  // namespace
}  // namespace jfm::pjrt

int main() {
  jfm::pjrt::Calls();
  jfm::pjrt::BadCalls();
  jfm::pjrt::CAbi();
  std::puts("attention: good");
  return 0;
}
