// Measured choices: which kernels calls of a class take instead of the table's defaults. Text
// to table only: who measures and keeps it is the Python package (autotuner.py).
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "plugin/attention/problem.h"
#include "plugin/attention/variants.h"
#include "plugin/status.h"

namespace jfm {

// What calls have in common that share their measurement:
// "float16 d64 v64 q2048 k2048 n32 g1 causal bias". The head dims; q_len, kv_len and the number
// of batch indices times heads, rounded up to powers of two; query heads per kv head; what
// options and optional operands there are, the latter in alphabetical order.
std::string ShapeClass(const AttentionProblem& problem);

struct Choice {
  Form form = Form::kNone;               // kNone: as without it
  std::vector<const Variant*> variants;  // at most one of a kernel; others are the defaults
};

class Choices {
 public:
  // A line "class<tab>pass<tab>form<tab>host_name[,host_name…]" each: pass is forward or
  // backward, form A, B or -; there may be no host_name. The error names the line.
  static Result<Choices> Parse(const std::string& text);

  // Null: nothing was measured.
  const Choice* Find(const std::string& shape_class, const std::string& pass) const;

 private:
  std::map<std::pair<std::string, std::string>, Choice> choices_;
};

}  // namespace jfm
