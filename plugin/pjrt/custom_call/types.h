// What one custom call of a program says: target, attributes, types of its values.
// Plain data, decoded from a plan; knows neither handlers nor buffers.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "plugin/status.h"

namespace jfm::pjrt {

struct TensorType {
  int32_t dtype = 0;  // xla::PrimitiveType
  std::vector<int64_t> dims;

  bool is_token() const;
  int64_t num_elements() const;
  // Of a dense array; 0 for tokens. Types below a byte take one byte per element, as they
  // do in the buffers of XLA's hosts. Create() refuses types that it has no size for.
  int64_t size_bytes() const;
};

// Bytes per element; 0 for tokens and for types that we do not know.
int64_t ElementBytes(int32_t dtype);

enum class AttributeKind : int32_t { kArray = 1, kDictionary = 2, kScalar = 3, kString = 4 };

struct AttributeValue;
using Attributes = std::vector<std::pair<std::string, AttributeValue>>;

struct AttributeValue {
  AttributeKind kind = AttributeKind::kString;
  int32_t dtype = 0;   // of an array's elements or of a scalar
  int64_t count = 0;   // elements of an array
  std::string data;    // the bytes of an array, a scalar or a string
  Attributes entries;  // of a dictionary
};

struct CallSpec {
  std::string target;
  Attributes attributes;
  std::vector<TensorType> operands;
  std::vector<TensorType> results;
};

// Values that a caller attached to one execution of a program, by FFI type id. Not owned.
class UserData {
 public:
  // FailedPrecondition when the type has a value already, as in XLA.
  Status Add(int64_t type_id, void* data);
  // Null when there is none (a value may not be null).
  void* Find(int64_t type_id) const;
  bool empty() const { return values_.empty(); }

 private:
  std::map<int64_t, void*> values_;
};

}  // namespace jfm::pjrt
