// Driver: attention on the device and by the CPU kernels, through the C ABI and through our own
// FFI handlers as the plugin calls them; from many threads, bad calls too. The Metal kernels
// themselves are not instrumented (the race checker is for them), the rest is.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plugin/c_api/c_api.h"
#include "plugin/pjrt/custom_call/handler_registry.h"
#include "tests/sanitize/specs.h"

extern "C" {
void* jax_flash_metal_forward_v3(const void* frame);
void* jax_flash_metal_backward_v3(const void* frame);
void* jax_flash_metal_gradient_v3(const void* frame);
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

// The optional operands in their order, with numbers that make sense.
struct Optional {
  TensorType type;
  std::vector<int32_t> ints;  // bits of whatever type it is
  std::vector<uint8_t> bytes;
  Data floats;

  void* data() {
    return !floats.empty() ? static_cast<void*>(floats.data())
           : !bytes.empty() ? static_cast<void*>(bytes.data())
                            : static_cast<void*>(ints.data());
  }
};

Optional FloatsOf(std::vector<int64_t> dims, int seed) {
  Optional optional;
  optional.floats = Numbers(dims, seed);
  optional.type = Floats(std::move(dims));
  return optional;
}

Optional IntsOf(std::vector<int64_t> dims, int32_t base, int32_t range, int32_t type) {
  Optional optional;
  int64_t count = 1;
  for (int64_t size : dims) count *= size;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t value = base + static_cast<int32_t>(i * 5 % range);
    if (type == XLA_FFI_PRED) {
      optional.bytes.push_back(value != 0);
    } else {
      optional.ints.push_back(value);
    }
  }
  optional.type = {type, std::move(dims)};
  return optional;
}

std::vector<Optional> AllOptional() {
  return {FloatsOf({1, kHeads, kQLen, kKvLen}, 1),
          IntsOf({kBatch, 1, kQLen, kKvLen}, 0, 7, XLA_FFI_PRED),
          IntsOf({kBatch}, 11, 9, XLA_FFI_S32),          // q_offset
          IntsOf({kBatch, kQLen}, 0, 2, XLA_FFI_S32),    // segment ids
          IntsOf({1, kKvLen}, 0, 2, XLA_FFI_S32),
          IntsOf({kBatch}, kQLen - 4, 3, XLA_FFI_S32),   // lengths
          IntsOf({kBatch}, kKvLen - 9, 20, XLA_FFI_S32),
          FloatsOf({1, kHeads}, 2),                      // sinks
          FloatsOf({kBatch, kHeads}, 3),                 // slopes
          IntsOf({1, 2}, 12345, 9, XLA_FFI_U32),         // dropout
          IntsOf({kBatch}, 0, 7, XLA_FFI_S32),
          IntsOf({1, kHeads}, 0, 31, XLA_FFI_S32)};
}

constexpr const char* kTargets[] = {"jax_flash_metal_forward_v3", "jax_flash_metal_backward_v3",
                                    "jax_flash_metal_gradient_v3"};

// A call of plain attention, or with all options and operands. Results: those of the target.
CallSpec Spec(int target, bool has_options, std::vector<TensorType> results, int64_t of = 0,
              JfmBackend backend = JFM_METAL) {
  CallSpec spec;
  spec.target = kTargets[target];
  spec.attributes = {{"version", Int(3)},
                     {"scale", Float(0.25f)},
                     {"is_causal", Scalar<uint8_t>(XLA_FFI_PRED, has_options)},
                     {"q_offset", Int(16)},
                     {"window_left", Int(has_options ? 40 : -1)},
                     {"window_right", Int(-1)},
                     {"logits_soft_cap", Float(has_options ? 3 : 0)},
                     {"dropout_rate", Scalar<double>(XLA_FFI_F64, has_options ? 0.25 : 0)},
                     {"backend", Int(backend)},
                     {"operands", Int(has_options ? 4095 : 0)}};
  if (target == 2) spec.attributes.emplace_back("gradient_of", Int(of));
  spec.operands = {Floats(kQuery), Floats(kKey), Floats(kKey)};
  if (has_options) {
    for (const Optional& optional : AllOptional()) spec.operands.push_back(optional.type);
  }
  if (target > 0) {
    for (const auto& dims : {kQuery, kStatistic, kQuery, kStatistic}) {
      spec.operands.push_back(Floats(dims));
    }
  }
  spec.results = std::move(results);
  return spec;
}

CallSpec Forward(bool has_options, JfmBackend backend = JFM_METAL) {
  return Spec(0, has_options, {Floats(kQuery), Floats(kStatistic)}, 0, backend);
}
CallSpec Backward(bool has_options, JfmBackend backend) {
  return Spec(1, has_options, {Floats(kQuery), Floats(kKey), Floats(kKey)}, 0, backend);
}
// Of bias (in its size, and summed over all but the heads), sinks and slopes.
const struct { int64_t of; std::vector<int64_t> dims; } kGradients[] = {
    {0, {1, kHeads, kQLen, kKvLen}}, {0, {1, kHeads, 1, 1}}, {1, {1, kHeads}}, {2, {kBatch, kHeads}}};

struct Calls {
  std::unique_ptr<CustomCall> forward, backward;
  std::vector<std::unique_ptr<CustomCall>> gradients;

  Calls(bool has_options, JfmBackend backend)
      : forward(MakeCall(Forward(has_options, backend))),
        backward(MakeCall(Backward(has_options, backend))) {
    if (!has_options) return;
    for (const auto& gradient : kGradients) {
      gradients.push_back(MakeCall(Spec(2, true, {Floats(gradient.dims)}, gradient.of, backend)));
    }
  }
};

// All results that come from query, key, value and the cotangent out.
std::vector<Data> Step(const Calls& calls, int seed) {
  Data query = Numbers(kQuery, seed), key = Numbers(kKey, seed + 1),
       value = Numbers(kKey, seed + 2);
  std::vector<Optional> optional;
  if (!calls.gradients.empty()) optional = AllOptional();
  std::vector<void*> operands = {query.data(), key.data(), value.data()};
  for (Optional& one : optional) operands.push_back(one.data());
  std::vector<Data> results = {Data(query.size()), Data(kBatch * kHeads * kQLen)};
  CheckOk(calls.forward->Execute(operands, {results[0].data(), results[1].data()}, {}));
  Data out = results[0], logsumexp = results[1], dlogsumexp(logsumexp.size());
  for (Data* data : {&out, &logsumexp, &out, &dlogsumexp}) operands.push_back(data->data());
  Data dquery(query.size()), dkey(key.size()), dvalue(value.size());
  CheckOk(calls.backward->Execute(operands, {dquery.data(), dkey.data(), dvalue.data()}, {}));
  for (float element : dquery) CHECK(std::isfinite(element));
  for (Data* data : {&dquery, &dkey, &dvalue}) results.push_back(*data);
  for (size_t i = 0; i < calls.gradients.size(); ++i) {
    Data gradient = Numbers(kGradients[i].dims, 0);
    CheckOk(calls.gradients[i]->Execute(operands, {gradient.data()}, {}));
    for (float element : gradient) CHECK(std::isfinite(element));
    results.push_back(gradient);
  }
  return results;
}

void CheckClose(const std::vector<Data>& got, const std::vector<Data>& expected) {
  CHECK(got.size() == expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    for (size_t k = 0; k < got[i].size(); ++k) {
      const float x = got[i][k], y = expected[i][k];
      CHECK(x == y || std::abs(x - y) <= 1e-4f * std::max(1.0f, std::abs(y)));
    }
  }
}

void GoodCalls() {
  void* const functions[] = {reinterpret_cast<void*>(jax_flash_metal_forward_v3),
                             reinterpret_cast<void*>(jax_flash_metal_backward_v3),
                             reinterpret_cast<void*>(jax_flash_metal_gradient_v3)};
  for (size_t i = 0; i < std::size(functions); ++i) {
    HandlerStages stages;
    stages.execute = functions[i];
    CheckOk(RegisterHandler(kTargets[i], stages));
  }
  for (bool has_options : {false, true}) {
    std::vector<Data> of_device;
    for (JfmBackend backend : {JFM_METAL, JFM_CPU}) {
      const Calls calls(has_options, backend);
      const std::vector<Data> expected = Step(calls, 1);
      if (backend == JFM_METAL) of_device = expected;
      CheckClose(expected, of_device);
      InThreads(4, [&](int) { CHECK(Step(calls, 1) == expected); });
    }
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
  spec = Forward(true);
  spec.operands.pop_back();
  fails(spec, "expected 15 operands");
  spec = Forward(true);
  spec.operands[3].dims[2] = 2;
  fails(spec, "bias must have the same q_len as query, or 1");
  spec = Forward(true);
  spec.operands[4].dtype = XLA_FFI_U8;
  fails(spec, "mask must be bool");
  spec = Forward(true);
  spec.attributes.back().second = Int(4095 & ~16);
  spec.operands.erase(spec.operands.begin() + 7);
  fails(spec, "must be given together, but got only q_segment_ids");
  spec = Spec(2, true, {Floats({1, kHeads})}, 0);
  fails(spec, "gradient must have 4 dimensions");
}

// One problem of the C ABI over dense memory without batch dimensions.
struct Problem {
  Data query = Numbers({kQLen, kHeads, kDim}, 1), key = Numbers({kKvLen, kKvHeads, kDim}, 2);
  Data value = Numbers({kKvLen, kKvHeads, kDim}, 3), out = Data(query.size());
  Data logsumexp = Data(kHeads * kQLen), dlogsumexp = Data(kHeads * kQLen);
  Data bias = Numbers({kHeads, kKvLen}, 4), dbias = Data(bias.size());
  Data sinks = Numbers({kHeads}, 5);
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
    c.window_left = c.window_right = -1;
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
    c.operands = JFM_HAS_BIAS | JFM_HAS_SINKS;
    c.bias = Tensor(bias, kKvLen, 0);  // shared over queries
    c.gradient = Tensor(dbias, kKvLen, 0);
    c.bias.col_stride = c.gradient.col_stride = 1;
    c.sinks = Tensor(sinks, 1, 0);
  }
};

void CAbi(JfmBackend backend) {
  char error[1024];
  for (int num_threads : {1, 3, 0}) {
    jfm_set_threads(num_threads);
    InThreads(3, [&](int) {
      Problem problem;
      problem.c.backend = backend;
      char message[1024];
      const int forward = jfm_attention_forward(&problem.c, message, sizeof(message));
      if (forward != 0) std::fprintf(stderr, "%s\n", message);
      CHECK(forward == 0);
      const int backward = jfm_attention_backward(&problem.c, message, sizeof(message));
      if (backward != 0) std::fprintf(stderr, "%s\n", message);
      CHECK(backward == 0);
      CHECK(jfm_attention_gradient(&problem.c, message, sizeof(message)) == 0);
      for (float element : problem.dbias) CHECK(std::isfinite(element) && element != 0);
    });
  }
  CHECK(jfm_device_facts(backend, error, sizeof(error)) == 0);
  Problem problem;
  problem.c.backend = backend;
  for (int pass : {JFM_FORWARD, JFM_BACKWARD, JFM_GRADIENT}) {
    const int too_small = backend == JFM_CPU ? 0 : 11;
    CHECK(jfm_attention_plan(&problem.c, pass, error, sizeof(error)) == too_small);
    std::vector<char> plan(1 << 16);
    CHECK(jfm_attention_plan(&problem.c, pass, plan.data(), plan.size()) == 0);
    CHECK(std::strstr(plan.data(), "\"kernel\": \"") != nullptr);
    CHECK(jfm_attention_compile(&problem.c, pass, error, sizeof(error)) == 0);
  }
  problem.c.key.size_bytes = 4;
  CHECK(jfm_attention_forward(&problem.c, error, sizeof(error)) != 0);
  problem = Problem();
  problem.c.backend = backend;
  problem.c.head_dim = 1000;
  CHECK(jfm_attention_forward(&problem.c, error, sizeof(error)) != 0);
  CHECK(jfm_attention_forward(&problem.c, nullptr, 0) != 0);
}

}  // namespace
}  // namespace jfm::pjrt

int main() {
  jfm::pjrt::GoodCalls();
  jfm::pjrt::BadCalls();
  jfm::pjrt::CAbi(JFM_METAL);
  jfm::pjrt::CAbi(JFM_CPU);
  std::puts("attention: good");
  return 0;
}
