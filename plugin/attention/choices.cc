#include "plugin/attention/choices.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <optional>

#include "plugin/attention/planner.h"
#include "plugin/attention/tensors.h"

namespace jfm {
namespace {

int64_t PowerOfTwo(int64_t x) {
  int64_t power = x > 0 ? 1 : 0;
  while (power < x) power *= 2;
  return power;
}

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

// What of a class says whether a kernel fits.
struct ClassFacts {
  Dtype dtype;
  int64_t head_dim, q_len;
};

// The number behind a letter: "d64".
std::optional<int64_t> Number(const std::string& word, char letter) {
  if (word.size() < 2 || word.size() > 18 || word[0] != letter) return {};
  if (!std::all_of(word.begin() + 1, word.end(),
                   [](unsigned char c) { return std::isdigit(c) != 0; })) {
    return {};
  }
  return std::stoll(word.substr(1));
}

std::optional<ClassFacts> ParseClass(const std::string& text) {
  constexpr char kLetters[] = {'d', 'v', 'q', 'k', 'n', 'g'};
  const std::vector<std::string> words = Split(text, ' ');
  if (words.size() < 1 + sizeof(kLetters)) return {};
  std::array<int64_t, sizeof(kLetters)> numbers;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const std::optional<int64_t> number = Number(words[i + 1], kLetters[i]);
    if (!number) return {};
    numbers[i] = *number;
  }
  for (Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16}) {
    if (words[0] == Name(dtype)) {
      return ClassFacts{dtype, std::max(numbers[0], numbers[1]), numbers[2]};
    }
  }
  return {};
}

Result<const Variant*> ParseVariant(const std::string& name, const ClassFacts& facts) {
  const Variant* v = FindVariant(name);
  if (v == nullptr) return InvalidArgument("there is no kernel \"" + name + "\"");
  if (v->dtype != facts.dtype) {
    return InvalidArgument(name + " is for " + Name(v->dtype) + ", but the class is for " +
                           Name(facts.dtype));
  }
  if (v->head_dim < facts.head_dim) {
    return InvalidArgument(name + " takes a head_dim of at most " + std::to_string(v->head_dim) +
                           ", but the class has " + std::to_string(facts.head_dim));
  }
  return v;
}

Result<Form> ParseForm(const std::string& text, bool is_backward, int64_t q_len) {
  if (text == "-") return Form::kNone;
  if (!is_backward || (text != "A" && text != "B")) {
    return InvalidArgument("form must be " + std::string(is_backward ? "A, B or -" : "-") +
                           " for this pass, but got \"" + text + "\"");
  }
  if (text == "A") return Form::kA;
  if (q_len <= kShortQuery) {
    return InvalidArgument("form B is for a q_len above " + std::to_string(kShortQuery) +
                           ", but the class has " + std::to_string(q_len));
  }
  return Form::kB;
}

}  // namespace

std::string ShapeClass(const AttentionProblem& p) {
  int64_t num_pairs = p.num_heads;
  for (int64_t size : p.batch_sizes) num_pairs *= size;
  std::string text = Name(p.dtype);
  const std::pair<const char*, int64_t> numbers[] = {
      {" d", p.head_dim},          {" v", p.value_head_dim},
      {" q", PowerOfTwo(p.q_len)}, {" k", PowerOfTwo(p.kv_len)},
      {" n", PowerOfTwo(num_pairs)}, {" g", p.num_heads / p.num_kv_heads}};
  for (const auto& [letter, number] : numbers) text += letter + std::to_string(number);
  if (p.is_causal) text += " causal";
  if (p.window_left >= 0 || p.window_right >= 0) text += " window";
  std::vector<std::string> names;
  for (size_t i = kFirstOptional; i < kFirstOptional + kNumOptional; ++i) {
    if (IsGiven(i, p)) names.push_back(kTensors[i].name);
  }
  if (p.logits_soft_cap > 0) names.push_back("softcap");
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) text += " " + name;
  return text;
}

Result<Choices> Choices::Parse(const std::string& text) {
  Choices choices;
  size_t number = 0;
  for (const std::string& line : Split(text, '\n')) {
    ++number;
    if (line.empty()) continue;
    const auto error = [&](const std::string& what) {
      return InvalidArgument("line " + std::to_string(number) + ": " + what + ".");
    };
    const std::vector<std::string> fields = Split(line, '\t');
    if (fields.size() != 4) {
      return error("there must be 4 fields, separated by tabs, but got " +
                   std::to_string(fields.size()));
    }
    const std::string &shape_class = fields[0], &pass = fields[1];
    const std::optional<ClassFacts> facts = ParseClass(shape_class);
    if (!facts) {
      return error("the class must begin like \"float16 d64 v64 q2048 k2048 n32 g1\", but got \"" +
                   shape_class + "\"");
    }
    if (pass != kForwardPass.name && pass != kBackwardPass.name) {
      return error("pass must be forward or backward, but got \"" + pass + "\"");
    }
    Result<Form> form = ParseForm(fields[2], pass == kBackwardPass.name, facts->q_len);
    if (!form.ok()) return error(form.status().message());
    Choice choice{*form, {}};
    std::vector<std::string> names;
    if (!fields[3].empty()) names = Split(fields[3], ',');
    for (const std::string& name : names) {
      Result<const Variant*> variant = ParseVariant(name, *facts);
      if (!variant.ok()) return error(variant.status().message());
      for (const Variant* other : choice.variants) {
        if (std::string(other->kernel) == (*variant)->kernel) {
          return error(name + " is of the same kernel as " + other->host_name);
        }
      }
      choice.variants.push_back(*variant);
    }
    if (!choices.choices_.emplace(std::pair(shape_class, pass), std::move(choice)).second) {
      return error("there is a choice for this class and pass already");
    }
  }
  return choices;
}

const Choice* Choices::Find(const std::string& shape_class, const std::string& pass) const {
  const auto found = choices_.find(std::pair(shape_class, pass));
  return found != choices_.end() ? &found->second : nullptr;
}

}  // namespace jfm
