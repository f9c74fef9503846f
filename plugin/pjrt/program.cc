// Talks to the host's compiler; execution of whole plans is in executor.cc.
#include "plugin/pjrt/program.h"

#include <algorithm>
#include <utility>

namespace jfm::pjrt {
namespace {

// The host's PJRT_Executable behind a loaded one, which answers questions about it.
class Unloaded {
 public:
  Unloaded(const Host& host, PJRT_LoadedExecutable* loaded) : host_(host) {
    PJRT_LoadedExecutable_GetExecutable_Args args = {};
    args.loaded_executable = loaded;
    status_ = host.Call(args);
    handle_ = args.executable;
    if (status_.ok() && handle_ == nullptr) status_ = WrongAnswer(args.kSlot, "gave none");
  }
  ~Unloaded() {
    if (!status_.ok()) return;
    PJRT_Executable_Destroy_Args args = {};
    args.executable = handle_;
    (void)host_.Call(args);
  }
  Unloaded(const Unloaded&) = delete;
  Unloaded& operator=(const Unloaded&) = delete;

  template <class Args>
  Status Ask(Args& args) const {
    if (!status_.ok()) return status_;
    args.executable = handle_;
    return host_.Call(args);
  }

 private:
  const Host& host_;
  Status status_;
  PJRT_Executable* handle_ = nullptr;
};

}  // namespace

Result<std::unique_ptr<HostExecutable>> HostExecutable::Compile(const Device& device,
                                                                const std::string& program,
                                                                const std::string& options) {
  PJRT_Program code = {};
  code.struct_size = sizeof(code);
  // The host does not write to it; the API just has no const there.
  code.code = const_cast<char*>(program.data());
  code.code_size = program.size();
  code.format = "mlir";
  code.format_size = 4;
  PJRT_Client_Compile_Args args = {};
  args.client = device.client;
  args.program = &code;
  args.compile_options = options.data();
  args.compile_options_size = options.size();
  if (Status status = device.host->Call(args); !status.ok()) return status;
  if (args.executable == nullptr) return WrongAnswer(args.kSlot, "gave no executable");
  std::unique_ptr<HostExecutable> executable(new HostExecutable(device, args.executable));
  if (Status status = executable->ReadOutputTypes(); !status.ok()) return status;
  return executable;
}

HostExecutable::~HostExecutable() {
  if (handle_ == nullptr) return;
  PJRT_LoadedExecutable_Destroy_Args args = {};
  args.executable = handle_;
  (void)device_.host->Call(args);
}

Status HostExecutable::ReadOutputTypes() {
  const Unloaded unloaded(*device_.host, handle_);
  PJRT_Executable_OutputElementTypes_Args types = {};
  if (Status status = unloaded.Ask(types); !status.ok()) return status;
  PJRT_Executable_OutputDimensions_Args dimensions = {};
  if (Status status = unloaded.Ask(dimensions); !status.ok()) return status;
  if (types.num_output_types > 0 &&
      (types.output_types == nullptr || dimensions.dim_sizes == nullptr)) {
    return WrongAnswer(types.output_types == nullptr ? types.kSlot : dimensions.kSlot,
                       "gave no list");
  }
  if (dimensions.num_outputs != types.num_output_types) {
    return WrongAnswer(dimensions.kSlot, "speaks of " + std::to_string(dimensions.num_outputs) +
                                             " results where there are " +
                                             std::to_string(types.num_output_types));
  }
  const int64_t* dims = dimensions.dims;
  for (size_t i = 0; i < types.num_output_types; ++i) {
    if (dims == nullptr && dimensions.dim_sizes[i] > 0) {
      return WrongAnswer(dimensions.kSlot, "gave no dimensions");
    }
    const int64_t* end = dims + dimensions.dim_sizes[i];
    if (PrimitiveTypeOf(types.output_types[i]) == 0) {
      return {Code::kUnimplemented, "a result of the program has an unknown element type (" +
                                        std::to_string(types.output_types[i]) + ")."};
    }
    output_types_.push_back({PrimitiveTypeOf(types.output_types[i]), {dims, end}});
    dims = end;
  }
  return {};
}

Status HostExecutable::RequireDefaultMemory() const {
  if (device_.memory == nullptr) return {};  // the host has no such notion
  PJRT_Memory_Kind_Args own = {};
  own.memory = device_.memory;
  if (!device_.host->Call(own).ok()) return {};  // nothing to compare with
  const std::string default_kind(own.kind, own.kind_size);
  const Unloaded unloaded(*device_.host, handle_);
  PJRT_Executable_OutputMemoryKinds_Args kinds = {};
  if (!unloaded.Ask(kinds).ok()) return {};  // 0.106 does not say
  for (size_t i = 0; i < kinds.num_outputs; ++i) {
    const std::string kind(kinds.memory_kinds[i], kinds.memory_kind_sizes[i]);
    if (kind == default_kind) continue;
    return {Code::kUnimplemented,
            "result " + std::to_string(i) + " of this program has the memory kind " + kind +
                ", and programs with custom calls return arrays in the default memory, which is " +
                default_kind + "."};
  }
  return {};
}

Result<std::vector<BufferRef>> HostExecutable::Execute(const std::vector<BufferRef>& arguments,
                                                       const std::vector<int64_t>& keep) const {
  std::vector<PJRT_Buffer*> inputs(arguments.size());
  std::transform(arguments.begin(), arguments.end(), inputs.begin(),
                 [](const BufferRef& buffer) { return buffer->handle(); });
  std::vector<PJRT_Buffer*> outputs(output_types_.size(), nullptr);
  PJRT_Buffer* const* input_lists[] = {inputs.data()};
  PJRT_Buffer** output_lists[] = {outputs.data()};
  // Newer hosts read members behind those of our struct: zeros.
  alignas(PJRT_ExecuteOptions) char options_memory[kPaddedSize] = {};
  PJRT_ExecuteOptions& options = *reinterpret_cast<PJRT_ExecuteOptions*>(options_memory);
  options.struct_size = kPaddedSize;
  options.non_donatable_input_indices = keep.data();
  options.num_non_donatable_input_indices = keep.size();
  PJRT_LoadedExecutable_Execute_Args args = {};
  args.executable = handle_;
  args.options = &options;
  args.argument_lists = input_lists;
  args.num_devices = 1;
  args.num_args = inputs.size();
  args.output_lists = output_lists;
  if (Status status = device_.host->Call(args); !status.ok()) return status;
  std::vector<BufferRef> results(outputs.size());
  std::transform(outputs.begin(), outputs.end(), results.begin(),
                 [this](PJRT_Buffer* buffer) { return OwnBuffer(device_, buffer); });
  if (std::find(outputs.begin(), outputs.end(), nullptr) != outputs.end()) {
    return WrongAnswer(args.kSlot, "left out a result");
  }
  return results;
}

HostExecutable::Facts HostExecutable::facts() const {
  Facts facts;
  const Unloaded unloaded(*device_.host, handle_);
  PJRT_Executable_SizeOfGeneratedCodeInBytes_Args size = {};
  if (unloaded.Ask(size).ok()) facts.code_bytes = std::max<int64_t>(size.size_in_bytes, 0);
  PJRT_Executable_GetCompiledMemoryStats_Args stats = {};
  if (unloaded.Ask(stats).ok()) facts.temporary_bytes = stats.temp_size_in_bytes;
  return facts;
}

Result<Costs> HostExecutable::CostAnalysis() const {
  const Unloaded unloaded(*device_.host, handle_);
  PJRT_Executable_GetCostAnalysis_Args args = {};
  if (Status status = unloaded.Ask(args); !status.ok()) return status;
  Costs costs;
  for (size_t i = 0; i < args.num_properties; ++i) {
    const PJRT_NamedValue& property = args.properties[i];
    if (property.type != PJRT_NamedValueType_Float) continue;
    costs.emplace_back(std::string(property.name, property.name_size), property.float_value);
  }
  return costs;
}

Result<std::shared_ptr<const Program>> Program::Load(const Device& device, const HostAccess& access,
                                                     Plan plan, std::string options,
                                                     const HostExecutable& shadow) {
  std::shared_ptr<Program> program(
      new Program(device, access, std::move(plan), std::move(options)));
  if (Status status = program->Prepare(shadow); !status.ok()) return status;
  return std::shared_ptr<const Program>(std::move(program));
}

Status Program::Prepare(const HostExecutable& shadow) {
  output_types_ = shadow.output_types();
  const Block& main = plan_.blocks[0];
  if (output_types_.size() != main.outputs.size()) {
    return Internal("the plan of a program contradicts itself.");
  }
  for (ValueId input : main.inputs) {
    donates_.push_back(std::count(main.donated.begin(), main.donated.end(), input) > 0);
  }
  // Handlers first: a target that nobody registered should not cost a compilation.
  for (const PlannedCall& call : plan_.calls) {
    Result<std::unique_ptr<CustomCall>> bound = CustomCall::Create(call.spec);
    if (!bound.ok()) return bound.status();
    calls_.push_back(std::move(*bound));
  }
  for (const std::string& segment : plan_.segments) {
    Result<std::unique_ptr<HostExecutable>> executable =
        HostExecutable::Compile(device_, segment, plan_.options);
    if (!executable.ok()) return executable.status();
    segments_.push_back(std::move(*executable));
  }
  if (plan_.constants_segment < 0) return {};
  Result<std::vector<BufferRef>> constants =
      segments_[static_cast<size_t>(plan_.constants_segment)]->Execute({}, {});
  if (!constants.ok()) return constants.status();
  if (constants->size() != plan_.constants.size()) {
    return Internal("the plan of a program contradicts itself.");
  }
  constants_ = std::move(*constants);
  return {};
}

bool Program::is_native(size_t call) const {
  // An alias is filled in by memcpy, which objects of the device do not allow.
  return access_.native != nullptr && calls_[call]->takes_native_buffers() &&
         plan_.calls[call].aliases.empty();
}

int64_t Program::code_bytes() const {
  int64_t sum = 0;
  for (const auto& segment : segments_) sum += segment->facts().code_bytes;
  return sum;
}

int64_t Program::temporary_bytes() const {
  int64_t most = 0;
  for (const auto& segment : segments_) most = std::max(most, segment->facts().temporary_bytes);
  return plan_.peak_intermediate_bytes + most;
}

Result<Costs> Program::CostAnalysis() const {
  Costs sums;
  for (const Block& block : plan_.blocks) {
    for (const Step& step : block.steps) {
      if (step.kind != StepKind::kSegment) continue;
      Result<Costs> costs = segments_[step.index]->CostAnalysis();
      if (!costs.ok()) return costs.status();
      for (const auto& [name, value] : *costs) {
        const auto known = std::find_if(sums.begin(), sums.end(),
                                        [&n = name](const auto& sum) { return sum.first == n; });
        if (known == sums.end()) {
          sums.emplace_back(name, value);
        } else {
          known->second += value;
        }
      }
    }
  }
  return sums;
}

Status Program::NamedCosts(const std::vector<PJRT_NamedValue>** costs) const {
  std::lock_guard<std::mutex> lock(costs_mutex_);
  if (named_costs_.empty()) {
    Result<Costs> sums = CostAnalysis();
    if (!sums.ok()) return sums.status();
    costs_ = std::move(*sums);
    for (const auto& [name, value] : costs_) {
      PJRT_NamedValue property = {};
      property.struct_size = sizeof(property);
      property.name = name.data();
      property.name_size = name.size();
      property.type = PJRT_NamedValueType_Float;
      property.float_value = value;
      property.value_size = 1;
      named_costs_.push_back(property);
    }
  }
  *costs = &named_costs_;
  return {};
}

}  // namespace jfm::pjrt
