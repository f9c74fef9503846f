#include "plugin/attention/variants.h"

#include <algorithm>

namespace jfm {
namespace {

constexpr Variant kVariants[] = {
#include "variants.inc"
};

// A row applies up to its head_dim, from its family and its number of scores on.
struct BackwardFormRow {
  Dtype dtype;
  int head_dim, min_family;
  int64_t min_scores;
  char form;
};
constexpr BackwardFormRow kBackwardForms[] = {
#include "backward_forms.inc"
    {Dtype::kFloat32, 0, 0, 0, 'A'},  // applies to nothing: the table may be empty
};

}  // namespace

Result<const Variant*> DefaultVariant(const std::string& kernel, Dtype dtype, int64_t head_dim,
                                      int gpu_family) {
  const Variant* best = nullptr;
  for (const Variant& v : kVariants) {
    if (kernel != v.kernel || v.dtype != dtype || v.head_dim < head_dim) continue;
    if (!v.is_default || v.min_family > gpu_family) continue;
    const bool is_better =
        best == nullptr || v.head_dim < best->head_dim ||
        (v.head_dim == best->head_dim && v.min_family > best->min_family);
    if (is_better) best = &v;
  }
  if (best != nullptr) return best;
  return Internal("the variant table has no row of " + kernel + " for " + Name(dtype) +
                  ", head_dim " + std::to_string(head_dim) + " and GPU family " +
                  std::to_string(gpu_family));
}

const Variant* FindVariant(const std::string& host_name) {
  for (const Variant& v : kVariants) {
    if (host_name == v.host_name) return &v;
  }
  return nullptr;
}

const char* Name(Form form) {
  switch (form) {
    case Form::kNone:
      return "";
    case Form::kShort:
      return "short";
    case Form::kA:
      return "A";
    case Form::kB:
      return "B";
  }
  __builtin_unreachable();
}

Form DefaultBackwardForm(const AttentionProblem& p, int gpu_family) {
  const int64_t head_dim = std::max(p.head_dim, p.value_head_dim);
  for (const BackwardFormRow& row : kBackwardForms) {
    if (row.dtype == p.dtype && head_dim <= row.head_dim && gpu_family >= row.min_family &&
        p.q_len * p.kv_len >= row.min_scores) {
      return row.form == 'B' ? Form::kB : Form::kA;
    }
  }
  return Form::kA;
}

}  // namespace jfm
