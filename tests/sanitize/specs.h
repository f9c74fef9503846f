// Short ways to write down custom calls, for the drivers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plugin/ffi/xla_ffi.h"
#include "plugin/pjrt/custom_call/custom_call.h"
#include "tests/sanitize/driver.h"

namespace jfm::pjrt {

template <class T>
AttributeValue Scalar(int32_t dtype, T value) {
  AttributeValue attribute;
  attribute.kind = AttributeKind::kScalar;
  attribute.dtype = dtype;
  attribute.data.assign(reinterpret_cast<const char*>(&value), sizeof(value));
  return attribute;
}
inline AttributeValue Int(int64_t value) { return Scalar(XLA_FFI_S64, value); }
inline AttributeValue Int32(int32_t value) { return Scalar(XLA_FFI_S32, value); }
inline AttributeValue Float(float value) { return Scalar(XLA_FFI_F32, value); }
inline AttributeValue Text(const std::string& text) {
  AttributeValue attribute;
  attribute.data = text;
  return attribute;
}
template <class T>
AttributeValue Array(int32_t dtype, const std::vector<T>& values) {
  AttributeValue attribute;
  attribute.kind = AttributeKind::kArray;
  attribute.dtype = dtype;
  attribute.count = static_cast<int64_t>(values.size());
  attribute.data.assign(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  return attribute;
}
inline AttributeValue Dictionary(Attributes entries) {
  AttributeValue attribute;
  attribute.kind = AttributeKind::kDictionary;
  attribute.entries = std::move(entries);
  return attribute;
}

inline TensorType Floats(std::vector<int64_t> dims) { return {XLA_FFI_F32, std::move(dims)}; }
inline TensorType Ints(std::vector<int64_t> dims) { return {XLA_FFI_S64, std::move(dims)}; }
inline TensorType Bytes(std::vector<int64_t> dims) { return {XLA_FFI_U8, std::move(dims)}; }

inline std::unique_ptr<CustomCall> MakeCall(const CallSpec& spec) {
  Result<std::unique_ptr<CustomCall>> call = CustomCall::Create(spec);
  CheckOk(call.status());
  return std::move(*call);
}

}  // namespace jfm::pjrt
