// A plan ready to run: its segments compiled by the host, its calls bound to handlers, its
// constants computed. Immutable once loaded; any number of executions may run at once.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "plugin/pjrt/buffers.h"
#include "plugin/pjrt/custom_call/custom_call.h"
#include "plugin/pjrt/hosts/buffer_access.h"
#include "plugin/pjrt/plan.h"
#include "plugin/status.h"

namespace jfm::pjrt {

// The host's numbers about a program: "flops", "bytes accessed" and so on.
using Costs = std::vector<std::pair<std::string, float>>;

// A compiled program of the host, destroyed with this object.
class HostExecutable {
 public:
  static Result<std::unique_ptr<HostExecutable>> Compile(const Device& device,
                                                         const std::string& program,
                                                         const std::string& options);
  ~HostExecutable();
  HostExecutable(const HostExecutable&) = delete;
  HostExecutable& operator=(const HostExecutable&) = delete;

  PJRT_LoadedExecutable* handle() const { return handle_; }
  const std::vector<TensorType>& output_types() const { return output_types_; }
  // Gives the handle away; nothing is destroyed then.
  PJRT_LoadedExecutable* Release() { return std::exchange(handle_, nullptr); }

  // Runs it. `keep`: positions of arguments whose memory must not be reused although the
  // program was compiled to. The results may not be written yet.
  Result<std::vector<BufferRef>> Execute(const std::vector<BufferRef>& arguments,
                                         const std::vector<int64_t>& keep) const;

  // An error unless all results belong into the device's default memory.
  Status RequireDefaultMemory() const;

  // What the host says about it, where it says anything.
  struct Facts {
    int64_t code_bytes = 0;
    int64_t temporary_bytes = 0;
  };
  Facts facts() const;
  Result<Costs> CostAnalysis() const;

 private:
  HostExecutable(const Device& device, PJRT_LoadedExecutable* handle)
      : device_(device), handle_(handle) {}
  Status ReadOutputTypes();

  const Device device_;
  PJRT_LoadedExecutable* handle_;
  std::vector<TensorType> output_types_;
};

class Program {
 public:
  // `options`: the caller's, for serialisation. `shadow`: the plan's, compiled; says what
  // the results are. Compiles the segments and runs that of the constants.
  static Result<std::shared_ptr<const Program>> Load(const Device& device, const HostAccess& access,
                                                     Plan plan, std::string options,
                                                     const HostExecutable& shadow);

  const Device& device() const { return device_; }
  const HostAccess& access() const { return access_; }
  // Whether the call's handler gets objects of the device.
  bool is_native(size_t call) const;
  const Plan& plan() const { return plan_; }
  const std::string& options() const { return options_; }
  const std::vector<TensorType>& output_types() const { return output_types_; }
  // Per argument, whether callers give it away.
  const std::vector<bool>& donates() const { return donates_; }
  const HostExecutable& segment(size_t index) const { return *segments_[index]; }
  const CustomCall& call(size_t index) const { return *calls_[index]; }
  const std::vector<BufferRef>& constants() const { return constants_; }

  // What all segments say together. Costs count every step once, as XLA does for loops.
  int64_t code_bytes() const;
  int64_t temporary_bytes() const;
  // The pointer is good as long as this object.
  Status NamedCosts(const std::vector<PJRT_NamedValue>** costs) const;

 private:
  Program(const Device& device, const HostAccess& access, Plan plan, std::string options)
      : device_(device), access_(access), plan_(std::move(plan)), options_(std::move(options)) {}
  Status Prepare(const HostExecutable& shadow);

  const Device device_;
  const HostAccess access_;
  const Plan plan_;
  const std::string options_;
  std::vector<TensorType> output_types_;
  std::vector<bool> donates_;
  std::vector<std::unique_ptr<HostExecutable>> segments_;
  std::vector<std::unique_ptr<CustomCall>> calls_;
  std::vector<BufferRef> constants_;

  Result<Costs> CostAnalysis() const;
  mutable std::mutex costs_mutex_;  // guards the two below, made when first asked for
  mutable Costs costs_;
  mutable std::vector<PJRT_NamedValue> named_costs_;
};

}  // namespace jfm::pjrt
