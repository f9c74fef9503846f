// The backward pass in its forms. A: dQ and dK, dV by a kernel each, which both recompute dS.
// B: the kernel of dK, dV leaves dS in scratch, and dQ = dS·K is a product; so that the scratch
// is bounded, in chunks of heads, or of keys where a head's dS alone is too large.
#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "plugin/attention/plan_builder.h"
#include "plugin/attention/plan_steps.h"
#include "plugin/attention/planner.h"
#include "plugin/attention/problem_checks.h"

namespace jfm {
namespace {

constexpr Kernel kDq = {"attention_backward_dq", kWidths | kScores};
constexpr Kernel kDkv = {"attention_backward_dkv", kWidths | kScores | kWrites};
constexpr Kernel kDkvCombine = {"attention_backward_dkv_combine", kWidths};
constexpr Kernel kDqProduct = {"attention_backward_dq_product", kWidths | kScores};
constexpr Kernel kShortDq = {"attention_short_dq", kWidths | kScores};
constexpr Kernel kShortDqCombine = {"attention_short_dq_combine", kWidths};

// So that the partial sums, which are written and read once, take less than a tenth of a part's
// time: 16 bytes per key and column for 8 operations per query, on a GPU as in BytesWork.
constexpr int64_t kMinQueriesPerPart = 1024;
constexpr int64_t kMinChunkKeys = 128;    // and their number a multiple of it
constexpr int64_t kFragment = 8;          // rows and columns

int64_t NumFragments(int64_t size) { return CeilDiv(size, kFragment); }

// How the sums of dK and dV, over the blocks of queries of all query heads of a key-value head,
// are cut. A function of the shape alone, like SplitKeys.
struct Parts {
  int64_t num_parts, blocks_per_part;
};

Result<Parts> PartsOf(const AttentionProblem& p, int64_t inner_batch, const Variant& dkv) {
  const int64_t num_blocks = p.num_heads / p.num_kv_heads * CeilDiv(p.q_len, dkv.block_q);
  const int64_t num_elements =
      inner_batch * p.num_kv_heads * p.kv_len * (p.head_dim + p.value_head_dim);
  Parts parts = {1, num_blocks};
  if (num_blocks > 0 && num_elements > 0) {
    const int64_t simdgroups =
        CeilDiv(p.kv_len, dkv.block_kv) * p.num_kv_heads * inner_batch * dkv.num_simdgroups;
    const int64_t most = std::min(num_blocks / CeilDiv(kMinQueriesPerPart, dkv.block_q),
                                  kMaxPartialBytes / (4 * num_elements));
    const int64_t wanted =
        std::clamp<int64_t>(kTargetSimdgroups / simdgroups, 1, std::max<int64_t>(most, 1));
    parts.blocks_per_part = CeilDiv(num_blocks, wanted);
    parts.num_parts = CeilDiv(num_blocks, parts.blocks_per_part);
  }
  if (parts.blocks_per_part > std::numeric_limits<int32_t>::max()) {
    return InvalidArgument("the gradient of key would be a sum over more than 2^31 - 1 blocks of "
                           "scores at once.");
  }
  return parts;
}

// What one launch of the kernel of dK, dV computes: a box of batch indices, key-value heads and
// keys.
struct Chunk {
  int64_t first_batch, num_batches, first_head, num_heads, first_key, end_key;
};

// The whole problem at once.
Chunk WholeOf(const AttentionProblem& p, int64_t inner_batch) {
  return {0, inner_batch, 0, p.num_kv_heads, 0, p.kv_len};
}

// Bytes of dS of a key-value head at one batch index. float32 but for bfloat16: see
// ScoreGradient in attention_backward.h.
int64_t ScoreGradientBytes(const AttentionProblem& p, int64_t num_keys) {
  return p.num_heads / p.num_kv_heads * NumFragments(p.q_len) * NumFragments(num_keys) * kFragment *
         kFragment * (p.dtype == Dtype::kBfloat16 ? 2 : 4);
}

// Chunks whose dS takes at most `limit` bytes, if that is enough for kMinChunkKeys of one head:
// several whole batch indices, or some heads of one, or some keys of one head. In this order
// every key of a head is in one chunk, or its chunks follow each other.
std::vector<Chunk> ChunksOf(const AttentionProblem& p, int64_t inner_batch, int block_kv,
                            int64_t limit) {
  const int64_t unit_bytes = ScoreGradientBytes(p, p.kv_len);
  const int64_t num_units = limit / std::max<int64_t>(unit_bytes, 1);
  int64_t num_batches = 1, num_heads = 1, num_keys = std::max<int64_t>(p.kv_len, 1);
  if (num_units >= p.num_kv_heads) {
    num_heads = p.num_kv_heads;
    num_batches = num_units / num_heads;
  } else if (num_units > 0) {
    // As many chunks as needed, of about one size.
    num_heads = CeilDiv(p.num_kv_heads, CeilDiv(p.num_kv_heads, num_units));
  } else {
    const int64_t step = std::lcm<int64_t>(kMinChunkKeys, block_kv);
    num_keys = std::max<int64_t>(1, limit / ScoreGradientBytes(p, step)) * step;
  }
  std::vector<Chunk> chunks;
  for (int64_t batch = 0; batch < inner_batch; batch += num_batches) {
    for (int64_t head = 0; head < p.num_kv_heads; head += num_heads) {
      int64_t key = 0;
      do {  // once without keys: dQ is written
        chunks.push_back({batch, std::min(num_batches, inner_batch - batch), head,
                          std::min(num_heads, p.num_kv_heads - head), key,
                          std::min(key + num_keys, p.kv_len)});
        key += num_keys;
      } while (key < p.kv_len);
    }
  }
  return chunks;
}

// A chunk's share of the work of all.
double ShareOf(const Chunk& chunk, const AttentionProblem& p, int64_t inner_batch) {
  const double all = static_cast<double>(inner_batch) * static_cast<double>(p.num_kv_heads) *
                     static_cast<double>(p.kv_len);
  return static_cast<double>(chunk.num_batches) * static_cast<double>(chunk.num_heads) *
         static_cast<double>(chunk.end_key - chunk.first_key) / std::max(all, 1.0);
}

// How dS of the chunk stands in scratch.
void SetChunk(const Chunk& chunk, const AttentionProblem& p, const Variant& dkv,
              AttentionParams& params) {
  params.first_pair = chunk.first_batch * p.num_heads + chunk.first_head * params.num_groups;
  params.num_query_fragments = static_cast<int32_t>(NumFragments(p.q_len));
  params.num_key_fragments = static_cast<int32_t>(NumFragments(chunk.end_key - chunk.first_key));
  params.first_chunk_key = static_cast<int32_t>(chunk.first_key);
  params.end_chunk_key = static_cast<int32_t>(chunk.end_key);
  params.is_first_chunk = chunk.first_key == 0;
  params.is_last_chunk = chunk.end_key == p.kv_len;
  params.score_block_q = dkv.block_q;
  params.score_block_kv = dkv.block_kv;
}

Status AddDkv(PlanBuilder& builder, const AttentionProblem& p, const Parts& parts,
              const Chunk& chunk, bool writes_score_gradient) {
  std::vector<Binding> bindings = BackwardBindings(
      {{JFM_BUFFER_DKEY, Operand::kDkey}, {JFM_BUFFER_DVALUE, Operand::kDvalue}});
  if (parts.num_parts > 1) {
    bindings.push_back({JFM_BUFFER_PARTIAL, Operand::kPartial});
    bindings.push_back({JFM_BUFFER_PARTIAL_DVALUE, Operand::kPartialDvalue});
  }
  if (writes_score_gradient) {
    bindings.push_back({JFM_BUFFER_SCORE_GRADIENT, Operand::kScoreGradient});
  }
  const double work = builder.PairWork(4 * (p.head_dim + p.value_head_dim));  // S, dP, dV, dK
  return builder.Add(
      kDkv, std::move(bindings), work * ShareOf(chunk, p, builder.inner_batch()),
      [&](const Variant& v, AttentionParams& params) -> Grid {
        params.num_parts = static_cast<int32_t>(parts.num_parts);
        params.blocks_per_part = static_cast<int32_t>(parts.blocks_per_part);
        if (writes_score_gradient) SetChunk(chunk, p, v, params);
        return {{CeilDiv(chunk.end_key - chunk.first_key, v.block_kv),
                 chunk.num_heads * parts.num_parts, chunk.num_batches},
                {chunk.first_key / v.block_kv, chunk.first_head * parts.num_parts,
                 chunk.first_batch}};
      });
}

Status AddDqProduct(PlanBuilder& builder, const AttentionProblem& p, const Variant& dkv,
                    const Chunk& chunk) {
  return builder.Add(
      kDqProduct,
      {{JFM_BUFFER_KEY, Operand::kKey}, {JFM_BUFFER_DQUERY, Operand::kDquery},
       {JFM_BUFFER_SCORE_GRADIENT, Operand::kScoreGradient},
       {JFM_BUFFER_DQUERY_SUM, Operand::kDquerySum}},
      builder.PairWork(2 * p.head_dim) * ShareOf(chunk, p, builder.inner_batch()),
      [&](const Variant& v, AttentionParams& params) -> Grid {
        SetChunk(chunk, p, dkv, params);
        // A threadgroup per block of columns, too.
        const int64_t per_kv_head = params.num_groups * CeilDiv(p.head_dim, v.block_d);
        return {{CeilDiv(p.q_len, v.block_q), chunk.num_heads * per_kv_head, chunk.num_batches},
                {0, chunk.first_head * per_kv_head, chunk.first_batch}};
      });
}

Status AddChunks(PlanBuilder& builder, const AttentionProblem& p, const Parts& parts,
                 const Variant& dkv) {
  const std::vector<Chunk> chunks = ChunksOf(p, builder.inner_batch(), dkv.block_kv,
                                             builder.context().score_gradient_limit);
  int64_t bytes = 0, num_sum_rows = 0;
  for (const Chunk& chunk : chunks) {
    const int64_t num_keys = chunk.end_key - chunk.first_key;
    const int64_t num_heads = chunk.num_batches * chunk.num_heads;
    bytes = std::max(bytes, num_heads * ScoreGradientBytes(p, num_keys));
    if (num_keys < p.kv_len) num_sum_rows = p.num_heads / p.num_kv_heads * p.q_len;
    Status status = AddDkv(builder, p, parts, chunk, /*writes_score_gradient=*/true);
    if (status.ok()) status = AddDqProduct(builder, p, dkv, chunk);
    if (!status.ok()) return status;
  }
  builder.NeedScratch(Operand::kScoreGradient, bytes);
  builder.NeedScratch(Operand::kDquerySum, num_sum_rows * p.head_dim * 4);
  return {};
}

// Adds the parts, of which there are several.
Status AddDkvCombine(PlanBuilder& builder, const AttentionProblem& p, const Parts& parts) {
  const int64_t num_rows = builder.inner_batch() * p.num_kv_heads * p.kv_len;
  builder.NeedScratch(Operand::kPartial, parts.num_parts * num_rows * p.head_dim * 4);
  builder.NeedScratch(Operand::kPartialDvalue, parts.num_parts * num_rows * p.value_head_dim * 4);
  return builder.Add(
      kDkvCombine,
      {{JFM_BUFFER_PARTIAL, Operand::kPartial},
       {JFM_BUFFER_PARTIAL_DVALUE, Operand::kPartialDvalue},
       {JFM_BUFFER_DKEY, Operand::kDkey}, {JFM_BUFFER_DVALUE, Operand::kDvalue}},
      0, [&](const Variant& v, AttentionParams& params) -> Grid {
        params.num_parts = static_cast<int32_t>(parts.num_parts);
        const int64_t num_elements = num_rows * std::max(p.head_dim, p.value_head_dim);
        return {{CeilDiv(num_elements, 32 * v.num_simdgroups), 2, 1}};  // dK, dV
      });
}

// Whether the scratch of form B keeps to the limit: for a head at a time, or for the fewest keys
// of one and the sums of dQ between them.
bool KeepsToLimit(const AttentionProblem& p, int64_t limit) {
  const int64_t sums = p.num_heads / p.num_kv_heads * p.q_len * p.head_dim * 4;
  return ScoreGradientBytes(p, p.kv_len) <= limit ||
         ScoreGradientBytes(p, kMinChunkKeys) + sums <= limit;
}

// What was measured has run; else form B only in bounded memory.
Form FormOf(const PlanBuilder& builder, const AttentionProblem& p) {
  if (p.q_len <= kShortQuery) return Form::kShort;
  const Choice* choice = builder.choice();
  if (choice != nullptr && choice->form != Form::kNone) return choice->form;
  const PlanContext& context = builder.context();
  if (!KeepsToLimit(p, context.score_gradient_limit)) return Form::kA;
  return DefaultBackwardForm(p, context.gpu_family);
}

Result<Plan> PlanBackward(const AttentionProblem& p, const PlanContext& context) {
  if (Status status = CheckLimits(p); !status.ok()) return status;
  PlanBuilder builder(p, kBackwardPass, context);
  const Form form = FormOf(builder, p);
  builder.set_form(form);
  if (builder.inner_batch() == 0) return builder.Finish();
  Result<const Variant*> dkv = builder.Choose(kDkv);
  if (!dkv.ok()) return dkv.status();
  Result<Parts> parts = PartsOf(p, builder.inner_batch(), **dkv);
  if (!parts.ok()) return parts.status();

  const double dq_work = builder.PairWork(4 * p.head_dim + 2 * p.value_head_dim);  // S, dP, dQ
  Status status = AddMaskBlocks(builder, p);
  if (status.ok() && p.q_len > 0) status = AddDelta(builder, p);
  if (status.ok() && form == Form::kShort && p.q_len > 0) {
    status = AddSplit(builder, p, kShortDq,
                      BackwardBindings({{JFM_BUFFER_PARTIAL, Operand::kPartial}}), kShortDqCombine,
                      {{JFM_BUFFER_PARTIAL, Operand::kPartial},
                       {JFM_BUFFER_DQUERY, Operand::kDquery}},
                      p.head_dim, /*num_statistics=*/0, dq_work);
  }
  if (status.ok() && form == Form::kA) {
    status = builder.AddQueryBlocks(
        kDq, BackwardBindings({{JFM_BUFFER_DQUERY, Operand::kDquery}}), dq_work);
  }
  if (status.ok()) {
    status = form == Form::kB
                 ? AddChunks(builder, p, *parts, **dkv)
                 : AddDkv(builder, p, *parts, WholeOf(p, builder.inner_batch()),
                          /*writes_score_gradient=*/false);
  }
  if (status.ok() && parts->num_parts > 1) status = AddDkvCombine(builder, p, *parts);
  if (!status.ok()) return status;
  return builder.Finish();
}

}  // namespace

const Pass kBackwardPass = {"backward", Operand::kDlogsumexp, Operand::kDquery, Operand::kDvalue,
                            PlanBackward};

}  // namespace jfm
