// The tables of version 1 of the wire format, and the checks of a frame against them.
#include "plugin/ffi/call_frame.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace jfm {
namespace {

using Shape = std::vector<int64_t>;

// -- Texts --------------------------------------------------------------------------

struct DataTypeSpec {
  int32_t type;
  const char* name;
};
constexpr DataTypeSpec kDataTypes[] = {
    {XLA_FFI_PRED, "bool"},     {XLA_FFI_S8, "int8"},       {XLA_FFI_S16, "int16"},
    {XLA_FFI_S32, "int32"},     {XLA_FFI_S64, "int64"},     {XLA_FFI_U8, "uint8"},
    {XLA_FFI_U16, "uint16"},    {XLA_FFI_U32, "uint32"},    {XLA_FFI_U64, "uint64"},
    {XLA_FFI_F16, "float16"},   {XLA_FFI_F32, "float32"},   {XLA_FFI_F64, "float64"},
    {XLA_FFI_BF16, "bfloat16"}, {XLA_FFI_C64, "complex64"}, {XLA_FFI_C128, "complex128"},
};

std::string DataTypeName(int32_t type) {
  for (const DataTypeSpec& spec : kDataTypes) {
    if (spec.type == type) return spec.name;
  }
  return "XLA data type " + std::to_string(type);
}

std::string ShapeText(const Shape& shape) {
  std::vector<std::string> parts;
  for (int64_t size : shape) parts.push_back(std::to_string(size));
  return "[" + Join(parts) + "]";
}

// -- Buffers ------------------------------------------------------------------------

struct BufferArgument {
  int32_t dtype;
  void* data;
  Shape shape;
};

Result<BufferArgument> DecodeBuffer(const char* name, int32_t type, const void* value) {
  if (type != kXlaFfiBuffer) {
    return InvalidArgument(std::string(name) + " must be a buffer (argument type 1), but got " +
                           "argument type " + std::to_string(type) + ".");
  }
  if (value == nullptr) return InvalidArgument(std::string(name) + " is a null pointer.");
  const XLA_FFI_Buffer& buffer = *static_cast<const XLA_FFI_Buffer*>(value);
  if (buffer.struct_size < XLA_FFI_SIZE(XLA_FFI_Buffer, dims)) {
    return InvalidArgument(std::string(name) + " must have an XLA_FFI_Buffer of at least " +
                           std::to_string(XLA_FFI_SIZE(XLA_FFI_Buffer, dims)) + " bytes, but got " +
                           std::to_string(buffer.struct_size) + ".");
  }
  if (buffer.rank < 0 || (buffer.rank > 0 && buffer.dims == nullptr)) {
    return InvalidArgument(std::string(name) + " has no valid shape: rank " +
                           std::to_string(buffer.rank) + ".");
  }
  return BufferArgument{buffer.dtype, buffer.data, Shape(buffer.dims, buffer.dims + buffer.rank)};
}

// Appends `count` buffers, whose names start at kTensors[first].
Status DecodeBuffers(const char* what, const XLA_FFI_Values& values, size_t first, size_t count,
                     std::vector<BufferArgument>& buffers) {
  if (values.struct_size < XLA_FFI_SIZE(XLA_FFI_Values, values)) {
    return InvalidArgument(std::string("the list of ") + what + " must have at least " +
                           std::to_string(XLA_FFI_SIZE(XLA_FFI_Values, values)) +
                           " bytes, but got " + std::to_string(values.struct_size) + ".");
  }
  if (values.size != static_cast<int64_t>(count)) {
    std::vector<std::string> names;
    for (size_t i = 0; i < count; ++i) names.push_back(kTensors[first + i].name);
    return InvalidArgument("expected " + std::to_string(count) + " " + what + " (" + Join(names) +
                           "), but got " + std::to_string(values.size) + ".");
  }
  if (values.types == nullptr || values.values == nullptr) {
    return InvalidArgument(std::string("the list of ") + what + " is a null pointer.");
  }
  for (size_t i = 0; i < count; ++i) {
    Result<BufferArgument> buffer =
        DecodeBuffer(kTensors[first + i].name, values.types[i], values.values[i]);
    if (!buffer.ok()) return buffer.status();
    buffers.push_back(std::move(*buffer));
  }
  return {};
}

// -- Dtypes -------------------------------------------------------------------------

struct DtypeSpec {
  Dtype dtype;
  int32_t type;
};
constexpr DtypeSpec kDtypes[] = {{Dtype::kFloat32, XLA_FFI_F32},
                                 {Dtype::kFloat16, XLA_FFI_F16},
                                 {Dtype::kBfloat16, XLA_FFI_BF16}};

int32_t DataType(Dtype dtype) {
  for (const DtypeSpec& spec : kDtypes) {
    if (spec.dtype == dtype) return spec.type;
  }
  return 0;
}

Status DecodeDtypes(const std::vector<BufferArgument>& buffers, AttentionProblem& problem) {
  bool found = false;
  for (const DtypeSpec& spec : kDtypes) {
    if (spec.type != buffers[0].dtype) continue;
    problem.dtype = spec.dtype;
    found = true;
  }
  if (!found) {
    return InvalidArgument("query must be float32, float16 or bfloat16, but got " +
                           DataTypeName(buffers[0].dtype) + ".");
  }
  for (size_t i = 1; i < buffers.size(); ++i) {
    const TensorSpec& spec = kTensors[i];
    const Dtype expected = spec.dtype(problem);
    if (buffers[i].dtype != DataType(expected)) {
      return InvalidArgument(std::string(spec.name) + " must be " + Name(expected) +
                             (spec.is_statistic() ? "" : " like query") + ", but got " +
                             DataTypeName(buffers[i].dtype) + ".");
    }
  }
  return {};
}

// -- Shapes -------------------------------------------------------------------------

// The sizes after the batch dimensions, as the buffer has them.
std::vector<TensorSpec::Size> InnerSizes(const TensorSpec& spec) {
  if (spec.is_statistic()) return {spec.heads, spec.rows};
  return {spec.rows, spec.heads, spec.width};
}

const SizeSpec& FindSize(TensorSpec::Size size) {
  for (const SizeSpec& spec : kSizes) {
    if (spec.size == size) return spec;
  }
  __builtin_unreachable();  // kSizes has every size
}

std::string LayoutText(const TensorSpec& spec) {
  std::vector<std::string> names = {"*batch"};
  for (TensorSpec::Size size : InnerSizes(spec)) names.push_back(FindSize(size).name);
  return "[" + Join(names) + "]";
}

Status CheckRanks(const std::vector<BufferArgument>& buffers, size_t num_batch_dims) {
  for (size_t i = 0; i < buffers.size(); ++i) {
    const size_t expected = num_batch_dims + InnerSizes(kTensors[i]).size();
    if (buffers[i].shape.size() != expected) {
      return InvalidArgument(
          std::string(kTensors[i].name) + " must have " + std::to_string(expected) +
          " dimensions " + LayoutText(kTensors[i]) + ", with as many batch dimensions as query " +
          ShapeText(buffers[0].shape) + ", but got shape " + ShapeText(buffers[i].shape) + ".");
    }
  }
  return {};
}

void ReadSizes(const std::vector<BufferArgument>& buffers, const Pass& pass, size_t num_batch_dims,
               AttentionProblem& problem) {
  for (const SizeSpec& spec : kSizes) {
    const std::vector<TensorSpec::Size> sizes = InnerSizes(kTensors[spec.source]);
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] != spec.size) continue;
      problem.*spec.size = buffers[spec.source].shape[num_batch_dims + i];
    }
  }
  // A result always has the full batch sizes.
  const Shape& result = buffers[pass.num_operands].shape;
  problem.batch_sizes.assign(result.begin(), result.begin() + num_batch_dims);
}

Status CheckShapes(const std::vector<BufferArgument>& buffers, const Pass& pass,
                   const AttentionProblem& problem) {
  const size_t num_batch_dims = problem.batch_sizes.size();
  for (size_t i = 0; i < buffers.size(); ++i) {
    const TensorSpec& spec = kTensors[i];
    const Shape& shape = buffers[i].shape;
    const std::vector<TensorSpec::Size> sizes = InnerSizes(spec);
    for (size_t j = 0; j < sizes.size(); ++j) {
      if (shape[num_batch_dims + j] == problem.*sizes[j]) continue;
      const SizeSpec& size = FindSize(sizes[j]);
      const char* source = kTensors[size.source].name;
      return InvalidArgument(std::string(spec.name) + " must have the same " + size.name + " as " +
                             source + ", but got " + source + " of shape " +
                             ShapeText(buffers[size.source].shape) + " and " + spec.name +
                             " of shape " + ShapeText(shape) + ".");
    }
    const bool is_result = i >= pass.num_operands;
    for (size_t j = 0; j < num_batch_dims; ++j) {
      const int64_t full = problem.batch_sizes[j];
      if (shape[j] == full || (shape[j] == 1 && !is_result)) continue;
      const char* source = kTensors[pass.num_operands].name;
      return InvalidArgument("batch dimension " + std::to_string(j) + " of " + spec.name +
                             " must be " + std::to_string(full) + " as in the result " + source +
                             (is_result ? "" : " or 1 (shared)") + ", but got " + source +
                             " of shape " + ShapeText(buffers[pass.num_operands].shape) + " and " +
                             spec.name + " of shape " + ShapeText(shape) + ".");
    }
  }
  return {};
}

// Strides of a dense row-major buffer, and its size in bytes.
Status DescribeMemory(const TensorSpec& spec, const BufferArgument& buffer,
                      AttentionProblem& problem, HostMemory& memory) {
  const Shape& shape = buffer.shape;
  Shape strides(shape.size());
  int64_t num_elements = 1;
  bool is_empty = false;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = num_elements;
    is_empty |= shape[i] == 0;
    // Empty dimensions count as 1, so that a stride stays a stride.
    if (shape[i] < 0 ||
        __builtin_mul_overflow(num_elements, shape[i] == 0 ? 1 : shape[i], &num_elements)) {
      return InvalidArgument(std::string(spec.name) +
                             " has an impossible shape: " + ShapeText(shape) + ".");
    }
  }
  int64_t size_bytes;
  if (__builtin_mul_overflow(num_elements, SizeBytes(spec.dtype(problem)), &size_bytes)) {
    return InvalidArgument(std::string(spec.name) + " has too many elements: shape " +
                           ShapeText(shape) + ".");
  }
  memory = {buffer.data, is_empty ? 0 : size_bytes};

  TensorView& view = problem.*spec.view;
  const size_t num_batch_dims = problem.batch_sizes.size();
  for (size_t i = 0; i < num_batch_dims; ++i) {
    const bool is_shared = shape[i] != problem.batch_sizes[i];
    view.batch_strides.push_back(is_shared ? 0 : strides[i]);
  }
  view.row_stride = strides[num_batch_dims + (spec.is_statistic() ? 1 : 0)];
  view.head_stride = strides[num_batch_dims + (spec.is_statistic() ? 0 : 1)];
  return {};
}

Status DecodeTensors(const XLA_FFI_CallFrame& frame, const Pass& pass, HostProblem& host) {
  std::vector<BufferArgument> buffers;
  Status status = DecodeBuffers("operands", frame.arguments, 0, pass.num_operands, buffers);
  if (!status.ok()) return status;
  status = DecodeBuffers("results", frame.results, pass.num_operands, pass.num_results(), buffers);
  if (!status.ok()) return status;

  AttentionProblem& problem = host.problem;
  status = DecodeDtypes(buffers, problem);
  if (!status.ok()) return status;

  const size_t query_rank = buffers[0].shape.size();
  const size_t inner_rank = InnerSizes(kTensors[0]).size();
  if (query_rank < inner_rank || query_rank > inner_rank + kMaxBatchDims) {
    return InvalidArgument("query must have " + std::to_string(inner_rank) + " to " +
                           std::to_string(inner_rank + kMaxBatchDims) + " dimensions " +
                           LayoutText(kTensors[0]) + ", but got shape " +
                           ShapeText(buffers[0].shape) + ".");
  }
  const size_t num_batch_dims = query_rank - inner_rank;
  status = CheckRanks(buffers, num_batch_dims);
  if (!status.ok()) return status;
  ReadSizes(buffers, pass, num_batch_dims, problem);
  status = CheckShapes(buffers, pass, problem);
  if (!status.ok()) return status;
  for (size_t i = 0; i < buffers.size(); ++i) {
    status = DescribeMemory(kTensors[i], buffers[i], problem, host.memory[i]);
    if (!status.ok()) return status;
  }
  return {};
}

// -- Attributes ---------------------------------------------------------------------

std::string AttributeText(int32_t type, const void* value) {
  if (value == nullptr) return "a null pointer";
  switch (type) {
    case XLA_FFI_SCALAR: {
      const XLA_FFI_Scalar& scalar = *static_cast<const XLA_FFI_Scalar*>(value);
      if (scalar.value == nullptr) return "a null pointer";
      return "a scalar of type " + DataTypeName(scalar.dtype);
    }
    case XLA_FFI_ARRAY:
      return "an array of " + DataTypeName(static_cast<const XLA_FFI_Array*>(value)->dtype);
    case XLA_FFI_STRING:
      return "a string";
    case XLA_FFI_DICTIONARY:
      return "a dictionary";
    default:
      return "an attribute of type " + std::to_string(type);
  }
}

// A scalar attribute and where its value goes.
struct AttributeSpec {
  const char* name;
  int32_t type;
  void* target;
  size_t size_bytes;
};

std::string AttributeName(const XLA_FFI_Attributes& attributes, int64_t i) {
  const XLA_FFI_ByteSpan& name = *attributes.names[i];
  return std::string(name.data, name.size);
}

Status DecodeAttribute(const XLA_FFI_Attributes& attributes, const AttributeSpec& spec) {
  const void* value = nullptr;
  int32_t type = 0;
  int count = 0;
  for (int64_t i = 0; i < attributes.size; ++i) {
    if (AttributeName(attributes, i) != spec.name) continue;
    ++count;
    type = attributes.types[i];
    value = attributes.values[i];
  }
  const std::string expected = "a scalar of type " + DataTypeName(spec.type);
  if (count == 0) {
    return InvalidArgument(std::string("attribute ") + spec.name + " (" + expected +
                           ") is missing.");
  }
  if (count > 1) {
    return InvalidArgument(std::string("attribute ") + spec.name + " (" + expected +
                           ") must be given once, but got it " + std::to_string(count) + " times.");
  }
  const XLA_FFI_Scalar* scalar =
      type == XLA_FFI_SCALAR ? static_cast<const XLA_FFI_Scalar*>(value) : nullptr;
  if (scalar == nullptr || scalar->dtype != spec.type || scalar->value == nullptr) {
    return InvalidArgument(std::string("attribute ") + spec.name + " must be " + expected +
                           ", but got " + AttributeText(type, value) + ".");
  }
  std::memcpy(spec.target, scalar->value, spec.size_bytes);
  return {};
}

Status CheckAttributeList(const XLA_FFI_Attributes& attributes) {
  if (attributes.struct_size < XLA_FFI_SIZE(XLA_FFI_Attributes, values)) {
    return InvalidArgument("the list of attributes must have at least " +
                           std::to_string(XLA_FFI_SIZE(XLA_FFI_Attributes, values)) +
                           " bytes, but got " + std::to_string(attributes.struct_size) + ".");
  }
  const bool has_lists =
      attributes.types != nullptr && attributes.names != nullptr && attributes.values != nullptr;
  if (attributes.size < 0 || (attributes.size > 0 && !has_lists)) {
    return InvalidArgument(
        "the list of attributes is not valid: " + std::to_string(attributes.size) + " entries.");
  }
  return {};
}

Status DecodeAttributes(const XLA_FFI_Attributes& attributes, AttentionProblem& problem) {
  if (Status status = CheckAttributeList(attributes); !status.ok()) return status;
  int64_t version = 0;
  uint8_t is_causal = 0;
  const AttributeSpec version_spec = {"version", XLA_FFI_S64, &version, sizeof(version)};
  const AttributeSpec specs[] = {
      {"scale", XLA_FFI_F32, &problem.scale, sizeof(problem.scale)},
      {"is_causal", XLA_FFI_PRED, &is_causal, sizeof(is_causal)},
      {"q_offset", XLA_FFI_S64, &problem.q_offset, sizeof(problem.q_offset)},
  };
  // The version first: what another version has of attributes would only mislead.
  if (Status status = DecodeAttribute(attributes, version_spec); !status.ok()) return status;
  if (version != kWireVersion) {
    return InvalidArgument("attribute version must be " + std::to_string(kWireVersion) +
                           ", the version of this library, but got " + std::to_string(version) +
                           ": the Python package and its library are of different releases.");
  }
  std::vector<std::string> known = {version_spec.name};
  for (const AttributeSpec& spec : specs) {
    if (Status status = DecodeAttribute(attributes, spec); !status.ok()) return status;
    known.push_back(spec.name);
  }
  for (int64_t i = 0; i < attributes.size; ++i) {
    const std::string name = AttributeName(attributes, i);
    bool is_known = false;
    for (const std::string& other : known) is_known |= name == other;
    if (is_known) continue;
    return InvalidArgument("unknown attribute " + name + " (" +
                           AttributeText(attributes.types[i], attributes.values[i]) +
                           "); the attributes are " + Join(known) + ".");
  }
  problem.is_causal = is_causal != 0;
  return {};
}

}  // namespace

Result<HostProblem> DecodeCallFrame(const XLA_FFI_CallFrame& frame, const Pass& pass) {
  HostProblem host;
  Status status = DecodeAttributes(frame.attributes, host.problem);
  if (!status.ok()) return status;
  status = DecodeTensors(frame, pass, host);
  if (!status.ok()) return status;
  return host;
}

}  // namespace jfm
