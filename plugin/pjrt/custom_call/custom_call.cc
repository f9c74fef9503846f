// Call frames are prepared once per call site. An execution copies the buffers, which are
// all that changes, to its own stack.
#include "plugin/pjrt/custom_call/custom_call.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "plugin/c_boundary.h"
#include "plugin/ffi/native_buffers.h"
#include "plugin/pjrt/custom_call/handler_registry.h"
#include "plugin/pjrt/custom_call/runtime.h"

namespace jfm::pjrt {
namespace {

// -- Attributes ---------------------------------------------------------------------

// The bytes of a value, aligned for any type: std::string promises none.
class AlignedBytes {
 public:
  explicit AlignedBytes(const std::string& bytes) : blocks_(bytes.size() / sizeof(Block) + 1) {
    std::memcpy(blocks_.data(), bytes.data(), bytes.size());
  }
  void* data() { return blocks_.data(); }

 private:
  using Block = std::max_align_t;
  std::vector<Block> blocks_;
};

// One dictionary of attributes as handlers see it. Does not move: its structs point to
// each other.
class AttributeTable {
 public:
  // `where` names the dictionary in errors.
  static Result<std::unique_ptr<AttributeTable>> Create(const Attributes& attributes,
                                                        const std::string& where) {
    std::unique_ptr<AttributeTable> table(new AttributeTable);
    std::vector<const Attributes::value_type*> sorted;
    for (const auto& attribute : attributes) sorted.push_back(&attribute);
    // Handlers look attributes up by position or by binary search.
    std::sort(sorted.begin(), sorted.end(),
              [](const auto* a, const auto* b) { return a->first < b->first; });
    table->entries_.reserve(sorted.size());
    for (const auto* attribute : sorted) {
      const auto& [name, value] = *attribute;
      if (!table->entries_.empty() && table->entries_.back()->name == name) {
        return InvalidArgument(where + name + " is there twice");
      }
      auto entry = std::make_unique<Entry>(name, value.data);
      if (Status status = entry->Fill(value, where + name); !status.ok()) return status;
      table->entries_.push_back(std::move(entry));
    }
    for (const auto& entry : table->entries_) {
      table->types_.push_back(static_cast<int32_t>(entry->kind));
      table->names_.push_back(&entry->name_span);
      table->values_.push_back(entry->value);
    }
    table->frame_ = {sizeof(XLA_FFI_Attributes),
                     nullptr,
                     static_cast<int64_t>(table->entries_.size()),
                     table->types_.data(),
                     table->names_.data(),
                     table->values_.data()};
    return table;
  }

  const XLA_FFI_Attributes& frame() const { return frame_; }

 private:
  AttributeTable() = default;

  struct Entry {
    Entry(const std::string& attribute_name, const std::string& data)
        : name(attribute_name), name_span{name.data(), name.size()}, bytes(data) {}

    Status Fill(const AttributeValue& attribute, const std::string& where) {
      kind = attribute.kind;
      const int64_t element_bytes = ElementBytes(attribute.dtype);
      const auto size = static_cast<int64_t>(attribute.data.size());
      switch (kind) {
        case AttributeKind::kArray:
          if (element_bytes == 0 || attribute.count < 0 ||
              size != attribute.count * element_bytes) {
            return BadSize(attribute, where, attribute.count);
          }
          array = {attribute.dtype, static_cast<size_t>(attribute.count), bytes.data()};
          value = &array;
          return {};
        case AttributeKind::kDictionary: {
          Result<std::unique_ptr<AttributeTable>> table =
              AttributeTable::Create(attribute.entries, where + ".");
          if (!table.ok()) return table.status();
          dictionary = std::move(*table);
          value = &dictionary->frame_;
          return {};
        }
        case AttributeKind::kScalar:
          if (element_bytes == 0 || size != element_bytes) return BadSize(attribute, where, 1);
          scalar = {attribute.dtype, bytes.data()};
          value = &scalar;
          return {};
        case AttributeKind::kString:
          string = {static_cast<const char*>(bytes.data()), attribute.data.size()};
          value = &string;
          return {};
      }
      return InvalidArgument(where + " is of the unknown kind " +
                             std::to_string(static_cast<int32_t>(kind)));
    }

    static Status BadSize(const AttributeValue& attribute, const std::string& where,
                          int64_t count) {
      return InvalidArgument(where + " has " + std::to_string(attribute.data.size()) +
                             " bytes for " + std::to_string(count) + " values of XLA data type " +
                             std::to_string(attribute.dtype));
    }

    std::string name;
    XLA_FFI_ByteSpan name_span;
    AlignedBytes bytes;
    AttributeKind kind = AttributeKind::kString;
    XLA_FFI_Array array = {};
    XLA_FFI_Scalar scalar = {};
    XLA_FFI_ByteSpan string = {};
    std::unique_ptr<AttributeTable> dictionary;
    void* value = nullptr;  // points to one of these
  };

  std::vector<std::unique_ptr<Entry>> entries_;
  std::vector<int32_t> types_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<void*> values_;
  XLA_FFI_Attributes frame_ = {};
};

// -- Operands and results -----------------------------------------------------------

// The operands or the results of a call site, all but their addresses.
class BufferList {
 public:
  static Result<BufferList> Create(const std::vector<TensorType>& types, const char* what) {
    BufferList list;
    list.what_ = what;
    list.types_.assign(types.size(), kXlaFfiBuffer);
    for (size_t i = 0; i < types.size(); ++i) {
      const TensorType& type = types[i];
      if (!type.is_token() && ElementBytes(type.dtype) == 0) {
        return InvalidArgument(list.Name(i) + " has the unknown XLA data type " +
                               std::to_string(type.dtype));
      }
      if (std::any_of(type.dims.begin(), type.dims.end(), [](int64_t d) { return d < 0; })) {
        return InvalidArgument(list.Name(i) + " has a negative dimension");
      }
      auto dims = std::make_unique<int64_t[]>(type.dims.size() + 1);  // never a null pointer
      std::copy(type.dims.begin(), type.dims.end(), dims.get());
      list.buffers_.push_back({sizeof(XLA_FFI_Buffer), nullptr, type.dtype, nullptr,
                               static_cast<int64_t>(type.dims.size()), dims.get()});
      list.dims_.push_back(std::move(dims));
      list.is_token_.push_back(type.is_token());
      list.needs_data_.push_back(type.size_bytes() != 0);
    }
    return list;
  }

  size_t size() const { return buffers_.size(); }

  // Fills in what `values` of a frame points to; both arrays have size() elements.
  Status Fill(const std::vector<void*>& data, bool is_native, XLA_FFI_Buffer* buffers,
              void** pointers, XLA_FFI_Values* values) const {
    if (data.size() != size()) {
      return Internal("got " + std::to_string(data.size()) + " addresses for " +
                      std::to_string(size()) + " " + what_ + "s");
    }
    for (size_t i = 0; i < data.size(); ++i) {
      buffers[i] = buffers_[i];
      buffers[i].data = data[i];
      if (data[i] == nullptr && !is_token_[i]) {
        if (needs_data_[i]) return Internal(Name(i) + " has no memory");
        if (is_native) {
          pointers[i] = &buffers[i];
          continue;
        }
        // memcpy of nothing is undefined for null pointers, and handlers do not ask.
        alignas(64) static char nothing[64];
        buffers[i].data = nothing;
      }
      pointers[i] = &buffers[i];
    }
    *values = {sizeof(XLA_FFI_Values), nullptr, static_cast<int64_t>(size()),
               const_cast<int32_t*>(types_.data()), pointers};
    return {};
  }

 private:
  std::string Name(size_t i) const { return std::string(what_) + " " + std::to_string(i); }

  const char* what_ = "";
  std::vector<int32_t> types_;
  std::vector<XLA_FFI_Buffer> buffers_;
  std::vector<std::unique_ptr<int64_t[]>> dims_;
  std::vector<bool> is_token_;
  std::vector<bool> needs_data_;
};

// `count` elements, of which few live on the stack.
template <class T>
class SmallArray {
 public:
  explicit SmallArray(size_t count) {
    if (count > kInline) heap_ = std::make_unique<T[]>(count);
  }
  T* get() { return heap_ != nullptr ? heap_.get() : inline_; }

 private:
  static constexpr size_t kInline = 16;
  T inline_[kInline];  // not initialised
  std::unique_ptr<T[]> heap_;
};

// -- Calls --------------------------------------------------------------------------

XLA_FFI_CallFrameWithFuture EmptyFrame(const AttributeTable& attributes) {
  XLA_FFI_CallFrameWithFuture call = {};
  call.frame.struct_size = XLA_FFI_SIZE(XLA_FFI_CallFrame, attributes);
  call.frame.arguments.struct_size = sizeof(XLA_FFI_Values);
  call.frame.results.struct_size = sizeof(XLA_FFI_Values);
  call.frame.attributes = attributes.frame();
  return call;
}

class FfiCall final : public CustomCall {
 public:
  static Result<std::unique_ptr<CustomCall>> Create(const CallSpec& spec,
                                                    const UserData* user_data) {
    std::optional<Handler> handler = FindHandler(spec.target);
    if (!handler.has_value()) {
      return Status(Code::kNotFound, "no FFI handler is registered for the custom call target " +
                                         spec.target +
                                         "; registered are: " + RegisteredTargetsText() + ".");
    }
    std::unique_ptr<FfiCall> call(new FfiCall(*std::move(handler)));
    if (Status status = call->Prepare(spec, user_data); !status.ok()) return call->Named(status);
    return std::unique_ptr<CustomCall>(std::move(call));
  }

  Status Execute(const std::vector<void*>& operands, const std::vector<void*>& results,
                 const ExecuteContext& context) const override {
    return RunNamed(operands, results, context, /*is_native=*/false);
  }

  bool takes_native_buffers() const override { return handler_.takes_native_buffers; }

  Status ExecuteNative(const std::vector<void*>& operands, const std::vector<void*>& results,
                       const ExecuteContext& context) const override {
    return RunNamed(operands, results, context, /*is_native=*/true);
  }

 private:
  explicit FfiCall(Handler handler) : handler_(std::move(handler)) {}

  Status Prepare(const CallSpec& spec, const UserData* user_data) {
    Result<BufferList> operands = BufferList::Create(spec.operands, "operand");
    if (!operands.ok()) return operands.status();
    operands_ = std::move(*operands);
    Result<BufferList> results = BufferList::Create(spec.results, "result");
    if (!results.ok()) return results.status();
    results_ = std::move(*results);
    Result<std::unique_ptr<AttributeTable>> attributes =
        AttributeTable::Create(spec.attributes, "attribute ");
    if (!attributes.ok()) return attributes.status();
    attributes_ = std::move(*attributes);
    // As in XLA, this stage sees attributes only, and belongs to no device.
    XLA_FFI_CallFrameWithFuture call = EmptyFrame(*attributes_);
    XLA_FFI_ExecutionContext context;
    context.execution.user_data = user_data;
    context.execution.run_id = -1;
    context.execution.device_ordinal = -1;
    context.states[XLA_FFI_INSTANTIATE] = &instantiated_;
    return RunStage(XLA_FFI_INSTANTIATE, context, call);
  }

  Status RunNamed(const std::vector<void*>& operands, const std::vector<void*>& results,
                  const ExecuteContext& context, bool is_native) const {
    return WithoutExceptions([&]() -> Status {
      Status status = Run(operands, results, context, is_native);
      return status.ok() ? status : Named(status);
    });
  }

  Status Run(const std::vector<void*>& operands, const std::vector<void*>& results,
             const ExecuteContext& execution, bool is_native) const {
    XLA_FFI_CallFrameWithFuture call = EmptyFrame(*attributes_);
    XLA_FFI_Extension native = {sizeof(native), kJfmExtensionNativeBuffers, nullptr};
    if (is_native) call.frame.extensions = &native;
    const size_t count = operands_.size() + results_.size();
    SmallArray<XLA_FFI_Buffer> buffers(count);
    SmallArray<void*> pointers(count);
    Status status =
        operands_.Fill(operands, is_native, buffers.get(), pointers.get(), &call.frame.arguments);
    if (!status.ok()) return status;
    const size_t first = operands_.size();
    status = results_.Fill(results, is_native, buffers.get() + first, pointers.get() + first,
                           &call.frame.results);
    if (!status.ok()) return status;

    State prepared;
    State initialized;
    ScratchMemory memory;
    XLA_FFI_ExecutionContext context;
    context.execution = execution;
    context.states[XLA_FFI_INSTANTIATE] = &instantiated_;
    context.states[XLA_FFI_PREPARE] = &prepared;
    context.states[XLA_FFI_INITIALIZE] = &initialized;
    context.memory = &memory;
    for (int stage : {XLA_FFI_PREPARE, XLA_FFI_INITIALIZE, XLA_FFI_EXECUTE}) {
      if (status = RunStage(stage, context, call); !status.ok()) return status;
    }
    return {};
  }

  Status RunStage(int stage, XLA_FFI_ExecutionContext& context,
                  XLA_FFI_CallFrameWithFuture& call) const {
    const HandlerFunction& function = handler_.functions[stage];
    if (function.function == nullptr) return {};
    context.stage = stage;
    call.frame.api = ApiForMinor(function.api_minor);
    call.frame.context = &context;
    call.frame.stage = stage;
    call.future = nullptr;
    return CallHandler(function.function, &call);
  }

  Status Named(const Status& status) const {
    return {status.code(), "FFI handler " + handler_.name + ": " + status.message()};
  }

  const Handler handler_;
  BufferList operands_;
  BufferList results_;
  std::unique_ptr<AttributeTable> attributes_;
  // Written at the instantiate stage only. Mutable because later stages get a pointer to
  // it, through which they can set nothing.
  mutable State instantiated_;
};

}  // namespace

int64_t NewRunId() {
  static std::atomic<int64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

Result<std::unique_ptr<CustomCall>> CustomCall::Create(const CallSpec& spec,
                                                       const UserData* user_data) {
  std::unique_ptr<CustomCall> call;
  const Status status = WithoutExceptions([&]() -> Status {
    Result<std::unique_ptr<CustomCall>> result = FfiCall::Create(spec, user_data);
    if (!result.ok()) return result.status();
    call = std::move(*result);
    return {};
  });
  if (!status.ok()) return status;
  return call;
}

}  // namespace jfm::pjrt
