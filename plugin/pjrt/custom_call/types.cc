#include "plugin/pjrt/custom_call/types.h"

#include <algorithm>
#include <iterator>

namespace jfm::pjrt {
namespace {

constexpr int32_t kToken = 17;

// By xla::PrimitiveType. 0: a token, or a type whose values have no such size.
constexpr int8_t kElementBytes[] = {
    0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8,  // invalid, bool, s8 to s64, u8 to u64, f16, f32, f64
    0, 0, 8, 2, 0, 16,                      // tuple, opaque, c64, bf16, token, c128
    1, 1, 1, 1, 1, 1, 1,                    // f8e5m2, f8e4m3fn, s4, u4, three f8...fnuz
    1, 1, 1, 1, 1, 1, 1, 1,                 // s2, u2, f8e4m3, f8e3m4, s1, u1, f4e2m1fn, f8e8m0fnu
};

}  // namespace

int64_t ElementBytes(int32_t dtype) {
  if (dtype < 0 || dtype >= static_cast<int32_t>(std::size(kElementBytes))) return 0;
  return kElementBytes[dtype];
}

bool TensorType::is_token() const { return dtype == kToken; }

int64_t TensorType::num_elements() const {
  // An empty array may have other dimensions of any size.
  if (std::find(dims.begin(), dims.end(), 0) != dims.end()) return 0;
  int64_t count = 1;
  for (int64_t size : dims) count *= size;
  return count;
}

int64_t TensorType::size_bytes() const { return num_elements() * ElementBytes(dtype); }

Status UserData::Add(int64_t type_id, void* data) {
  if (data == nullptr) return InvalidArgument("user data must not be a null pointer");
  if (!values_.emplace(type_id, data).second) {
    return {Code::kFailedPrecondition,
            "user data of type id " + std::to_string(type_id) + " is there already"};
  }
  return {};
}

void* UserData::Find(int64_t type_id) const {
  const auto found = values_.find(type_id);
  return found == values_.end() ? nullptr : found->second;
}

}  // namespace jfm::pjrt
