// The tables of version 3 of the wire format, and the checks of a frame against them.
#include "plugin/ffi/call_frame.h"

#include <cstring>
#include <iterator>
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

Status ImpossibleShape(const char* name, const Shape& shape) {
  return InvalidArgument(std::string(name) + " has an impossible shape: " + ShapeText(shape) + ".");
}

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
  const Shape shape(buffer.dims, buffer.dims + buffer.rank);
  for (int64_t size : shape) {
    if (size < 0) return ImpossibleShape(name, shape);
  }
  return BufferArgument{buffer.dtype, buffer.data, shape};
}

// A buffer of the frame and the tensor (an index of kTensors) that it is.
struct TensorArgument {
  size_t tensor;
  TensorSpec spec;
  bool is_result;
  BufferArgument buffer;
};

// Appends the operands or the results of `tensors`.
Status DecodeBuffers(const char* what, const XLA_FFI_Values& values,
                     const std::vector<size_t>& tensors, bool are_results,
                     const AttentionProblem& problem, std::vector<TensorArgument>& arguments) {
  if (values.struct_size < XLA_FFI_SIZE(XLA_FFI_Values, values)) {
    return InvalidArgument(std::string("the list of ") + what + " must have at least " +
                           std::to_string(XLA_FFI_SIZE(XLA_FFI_Values, values)) +
                           " bytes, but got " + std::to_string(values.struct_size) + ".");
  }
  if (values.size != static_cast<int64_t>(tensors.size())) {
    std::vector<std::string> names;
    for (size_t tensor : tensors) names.push_back(kTensors[tensor].name);
    return InvalidArgument("expected " + std::to_string(names.size()) + " " + what + " (" +
                           Join(names) + "), but got " + std::to_string(values.size) + ".");
  }
  if (values.types == nullptr || values.values == nullptr) {
    return InvalidArgument(std::string("the list of ") + what + " is a null pointer.");
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorSpec spec = SpecOfTensor(tensors[i], problem);
    Result<BufferArgument> buffer = DecodeBuffer(spec.name, values.types[i], values.values[i]);
    if (!buffer.ok()) return buffer.status();
    arguments.push_back({tensors[i], spec, are_results, std::move(*buffer)});
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

// The dtype of a problem or of its bias is that of a buffer.
Status ReadDtype(const TensorArgument& argument, Dtype& dtype) {
  for (const DtypeSpec& spec : kDtypes) {
    if (spec.type != argument.buffer.dtype) continue;
    dtype = spec.dtype;
    return {};
  }
  return InvalidArgument(std::string(argument.spec.name) +
                         " must be float32, float16 or bfloat16, but got " +
                         DataTypeName(argument.buffer.dtype) + ".");
}

Status DecodeDtypes(const std::vector<TensorArgument>& arguments, AttentionProblem& problem) {
  for (const TensorArgument& argument : arguments) {
    Status status;
    if (argument.spec.view == &AttentionProblem::query) status = ReadDtype(argument, problem.dtype);
    if (argument.spec.view == &AttentionProblem::bias) {
      status = ReadDtype(argument, problem.bias_dtype);
    }
    if (!status.ok()) return status;
    const Element element = argument.spec.element;
    const std::string expected = SpecOf(element, problem).name;
    if (DataTypeName(argument.buffer.dtype) == expected) continue;
    const char* like = element == Element::kProblem ? " like query"
                       : element == Element::kBias  ? " like bias"
                                                    : "";
    return InvalidArgument(std::string(argument.spec.name) + " must be " + expected + like +
                           ", but got " + DataTypeName(argument.buffer.dtype) + ".");
  }
  return {};
}

// -- Shapes -------------------------------------------------------------------------

std::string LayoutText(const TensorSpec& spec) {
  std::vector<std::string> names = {"*batch"};
  for (size_t i = 0; i < spec.num_dims; ++i) names.push_back(spec.dims[i].name);
  return "[" + Join(names) + "]";
}

// The first arguments are query, key and value, from which the sizes are read.
Status CheckRanks(const std::vector<TensorArgument>& arguments, size_t num_batch_dims) {
  for (const TensorArgument& argument : arguments) {
    const size_t expected = num_batch_dims + argument.spec.num_dims;
    if (argument.buffer.shape.size() == expected) continue;
    return InvalidArgument(std::string(argument.spec.name) + " must have " +
                           std::to_string(expected) + " dimensions " + LayoutText(argument.spec) +
                           ", with as many batch dimensions as query " +
                           ShapeText(arguments[0].buffer.shape) + ", but got shape " +
                           ShapeText(argument.buffer.shape) + ".");
  }
  return {};
}

// The full size of a batch dimension, the largest of all, 0 if any is 0; and the argument
// that has it.
struct FullSize {
  int64_t size;
  size_t argument;
};
FullSize FindFullSize(const std::vector<TensorArgument>& arguments, size_t dimension) {
  FullSize full = {1, 0};
  for (size_t i = 0; i < arguments.size(); ++i) {
    const int64_t size = arguments[i].buffer.shape[dimension];
    if (size == 0) return {0, i};
    if (size > full.size) full = {size, i};
  }
  return full;
}

void ReadSizes(const std::vector<TensorArgument>& arguments, size_t num_batch_dims,
               AttentionProblem& problem) {
  for (const SizeSpec& size : kSizes) {
    const TensorArgument& source = arguments[Index(size.source)];
    for (size_t i = 0; i < source.spec.num_dims; ++i) {
      if (source.spec.dims[i].size != size.size) continue;
      problem.*size.size = source.buffer.shape[num_batch_dims + i];
    }
  }
  for (size_t i = 0; i < num_batch_dims; ++i) {
    problem.batch_sizes.push_back(FindFullSize(arguments, i).size);
  }
}

Status CheckInnerShape(const TensorArgument& argument, const std::vector<TensorArgument>& arguments,
                       const AttentionProblem& problem) {
  const TensorSpec& spec = argument.spec;
  const Shape& shape = argument.buffer.shape;
  for (size_t i = 0; i < spec.num_dims; ++i) {
    const DimSpec& dim = spec.dims[i];
    const int64_t size = shape[problem.batch_sizes.size() + i];
    if (size == dim.Size(problem) || (dim.may_be_shared && size == 1)) continue;
    if (dim.size == nullptr) {
      return InvalidArgument(std::string(spec.name) + " must have the shape " + LayoutText(spec) +
                             ", but got shape " + ShapeText(shape) + ".");
    }
    size_t source = 0;
    for (const SizeSpec& s : kSizes) {
      if (s.size == dim.size) source = Index(s.source);
    }
    const char* source_name = arguments[source].spec.name;
    return InvalidArgument(std::string(spec.name) + " must have the same " + dim.name + " as " +
                           source_name + (dim.may_be_shared ? ", or 1," : ",") + " but got " +
                           source_name + " of shape " + ShapeText(arguments[source].buffer.shape) +
                           " and " + spec.name + " of shape " + ShapeText(shape) + ".");
  }
  return {};
}

Status CheckShapes(const std::vector<TensorArgument>& arguments, const AttentionProblem& problem) {
  for (const TensorArgument& argument : arguments) {
    const char* name = argument.spec.name;
    const Shape& shape = argument.buffer.shape;
    if (Status status = CheckInnerShape(argument, arguments, problem); !status.ok()) return status;
    const bool may_be_shared = !argument.is_result || argument.tensor == kGradientTensor;
    for (size_t j = 0; j < problem.batch_sizes.size(); ++j) {
      const int64_t full = problem.batch_sizes[j];
      if (shape[j] == full || (shape[j] == 1 && may_be_shared)) continue;
      const TensorArgument& source = arguments[FindFullSize(arguments, j).argument];
      return InvalidArgument("batch dimension " + std::to_string(j) + " of " + name + " must be " +
                             std::to_string(full) + " as in " + source.spec.name +
                             (may_be_shared ? " or 1 (shared)" : "") + ", but got " +
                             source.spec.name + " of shape " + ShapeText(source.buffer.shape) +
                             " and " + name + " of shape " + ShapeText(shape) + ".");
    }
  }
  return {};
}

// Strides of a dense row-major buffer, and its size in bytes.
Status DescribeMemory(const TensorArgument& argument, AttentionProblem& problem,
                      HostMemory& memory) {
  const TensorSpec& spec = argument.spec;
  const Shape& shape = argument.buffer.shape;
  Shape strides(shape.size());
  int64_t num_elements = 1;
  bool is_empty = false;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = num_elements;
    is_empty |= shape[i] == 0;
    // Empty dimensions count as 1, so that a stride stays a stride.
    if (__builtin_mul_overflow(num_elements, shape[i] == 0 ? 1 : shape[i], &num_elements)) {
      return ImpossibleShape(spec.name, shape);
    }
  }
  int64_t size_bytes;
  if (__builtin_mul_overflow(num_elements, SpecOf(spec.element, problem).size_bytes, &size_bytes)) {
    return InvalidArgument(std::string(spec.name) + " has too many elements: shape " +
                           ShapeText(shape) + ".");
  }
  memory = {argument.buffer.data, is_empty ? 0 : size_bytes};

  TensorView& view = problem.*spec.view;
  const size_t num_batch_dims = problem.batch_sizes.size();
  const auto stride = [&](size_t i, int64_t full) { return shape[i] == full ? strides[i] : 0; };
  for (size_t i = 0; i < num_batch_dims; ++i) {
    view.batch_strides.push_back(stride(i, problem.batch_sizes[i]));
  }
  for (size_t i = 0; i < spec.num_dims; ++i) {
    const DimSpec& dim = spec.dims[i];
    if (dim.stride != nullptr) {
      view.*dim.stride = stride(num_batch_dims + i, dim.Size(problem));
    }
  }
  return {};
}

Status DecodeTensors(const XLA_FFI_CallFrame& frame, const Pass& pass, HostProblem& host) {
  AttentionProblem& problem = host.problem;
  std::vector<size_t> operands, results;
  for (size_t i : pass.Tensors(problem)) (pass.IsResult(i) ? results : operands).push_back(i);
  std::vector<TensorArgument> arguments;
  Status status = DecodeBuffers("operands", frame.arguments, operands, false, problem, arguments);
  if (!status.ok()) return status;
  status = DecodeBuffers("results", frame.results, results, true, problem, arguments);
  if (!status.ok()) return status;
  status = DecodeDtypes(arguments, problem);
  if (!status.ok()) return status;

  const TensorArgument& query = arguments[0];
  const size_t query_rank = query.buffer.shape.size();
  const size_t inner_rank = query.spec.num_dims;
  if (query_rank < inner_rank || query_rank > inner_rank + kMaxBatchDims) {
    return InvalidArgument("query must have " + std::to_string(inner_rank) + " to " +
                           std::to_string(inner_rank + kMaxBatchDims) + " dimensions " +
                           LayoutText(query.spec) + ", but got shape " +
                           ShapeText(query.buffer.shape) + ".");
  }
  const size_t num_batch_dims = query_rank - inner_rank;
  status = CheckRanks(arguments, num_batch_dims);
  if (!status.ok()) return status;
  ReadSizes(arguments, num_batch_dims, problem);
  status = CheckShapes(arguments, problem);
  if (!status.ok()) return status;
  for (const TensorArgument& argument : arguments) {
    status = DescribeMemory(argument, problem, host.memory[argument.tensor]);
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

Status CheckAttributeRange(const char* name, int64_t value, int64_t max) {
  if (value >= 0 && value <= max) return {};
  return InvalidArgument(std::string("attribute ") + name + " must be from 0 to " +
                         std::to_string(max) + ", but got " + std::to_string(value) + ".");
}

Status DecodeAttributes(const XLA_FFI_Attributes& attributes, const Pass& pass,
                        AttentionProblem& problem) {
  if (Status status = CheckAttributeList(attributes); !status.ok()) return status;
  int64_t version = 0, operands = 0, gradient_of = 0, backend = 0;
  uint8_t is_causal = 0;
  const AttributeSpec version_spec = {"version", XLA_FFI_S64, &version, sizeof(version)};
  std::vector<AttributeSpec> specs = {
      {"scale", XLA_FFI_F32, &problem.scale, sizeof(problem.scale)},
      {"is_causal", XLA_FFI_PRED, &is_causal, sizeof(is_causal)},
      {"q_offset", XLA_FFI_S64, &problem.q_offset, sizeof(problem.q_offset)},
      {"window_left", XLA_FFI_S64, &problem.window_left, sizeof(problem.window_left)},
      {"window_right", XLA_FFI_S64, &problem.window_right, sizeof(problem.window_right)},
      {"logits_soft_cap", XLA_FFI_F32, &problem.logits_soft_cap, sizeof(problem.logits_soft_cap)},
      {"dropout_rate", XLA_FFI_F64, &problem.dropout_rate, sizeof(problem.dropout_rate)},
      {"operands", XLA_FFI_S64, &operands, sizeof(operands)},
      {"backend", XLA_FFI_S64, &backend, sizeof(backend)},
  };
  if (&pass == &kGradientPass) {
    specs.push_back({"gradient_of", XLA_FFI_S64, &gradient_of, sizeof(gradient_of)});
  }
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
  for (Status status :
       {CheckAttributeRange("operands", operands, (1 << kNumOptional) - 1),
        CheckAttributeRange("gradient_of", gradient_of, std::size(kDifferentiable) - 1),
        CheckAttributeRange("backend", backend, static_cast<int64_t>(Backend::kCpu))}) {
    if (!status.ok()) return status;
  }
  problem.is_causal = is_causal != 0;
  problem.gradient_of = static_cast<GradientOf>(gradient_of);
  problem.backend = static_cast<Backend>(backend);
  SetGiven(problem, operands);
  return {};
}

}  // namespace

Result<HostProblem> DecodeCallFrame(const XLA_FFI_CallFrame& frame, const Pass& pass) {
  HostProblem host;
  Status status = DecodeAttributes(frame.attributes, pass, host.problem);
  if (!status.ok()) return status;
  status = DecodeTensors(frame, pass, host);
  if (!status.ok()) return status;
  return host;
}

}  // namespace jfm
