// Driver: the Apple layer over the fake Objective-C runtime and Metal, which the software
// device runs: attention through selectors, every error path, references balanced after each.
//
//     driver NO_CLASSES_LIBRARY [CASE|list]    (without a case: all that can share a process)
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plugin/attention/attention.h"
#include "plugin/device/apple/apple_device.h"
#include "plugin/device/apple/command_buffer.h"
#include "plugin/device/apple/kernel_sources.h"
#include "plugin/device/default_device.h"
#include "plugin/device/software/software_device.h"
#include "tests/plugin/device/fake_metal/fake_metal.h"
#include "tests/sanitize/attention_case.h"

// Counted: an archive must be on the disk before it gets its name.
static std::atomic<int> num_syncs{0};
extern "C" int fsync(int file) {
  ++num_syncs;
  return static_cast<int>(syscall(SYS_fsync, file));
}

namespace jfm {
namespace {

namespace files = std::filesystem;

constexpr const char* kNewLibrary = "newLibraryWithSource:options:error:";
constexpr const char* kNewFunction = "newFunctionWithName:constantValues:error:";
constexpr const char* kNewPipeline =
    "newComputePipelineStateWithDescriptor:options:reflection:error:";
constexpr const char* kNewArchive = "newBinaryArchiveWithDescriptor:error:";
constexpr const char* kAddToArchive = "addComputePipelineFunctionsWithDescriptor:error:";
constexpr const char* kWriteArchive = "serializeToURL:error:";
constexpr const char* kNewBuffer = "newBufferWithLength:options:";
constexpr const char* kAlias = "newBufferWithBytesNoCopy:length:options:deallocator:";

const size_t kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

std::unique_ptr<Device> Open() {
  Result<std::unique_ptr<Device>> device = OpenAppleDevice();
  CheckOk(device.status());
  return std::move(*device);
}

void Fail(const char* selector, int mode, const char* message = "planted", int count = 1,
          int skip = 0) {
  fake_metal_fail(selector, skip, count, mode, message);
}

template <class T>
T Take(Result<T> result) {
  CheckOk(result.status());
  return std::move(*result);
}

// Counts how often a selector was sent while it lives.
class Calls {
 public:
  explicit Calls(const char* selector) : selector_(selector), before_(fake_metal_calls(selector)) {}
  int64_t count() const { return fake_metal_calls(selector_) - before_; }

 private:
  const char* selector_;
  int64_t before_;
};

// Page-aligned memory.
class Pages {
 public:
  explicit Pages(size_t count)
      : data_(static_cast<char*>(std::aligned_alloc(kPage, count * kPage))) {
    std::memset(data_, 1, count * kPage);
  }
  ~Pages() { std::free(data_); }
  char* data() const { return data_; }

 private:
  char* data_;
};

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (files::temp_directory_path() / "jfm_apple_XXXXXX").string();
    CHECK(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~TemporaryFolder() { files::remove_all(path_); }
  const files::path& path() const { return path_; }
  std::vector<files::path> Files() const {
    std::vector<files::path> found;
    for (const auto& entry : files::recursive_directory_iterator(path_)) {
      if (entry.is_regular_file()) found.push_back(entry.path());
    }
    std::sort(found.begin(), found.end());
    return found;
  }

 private:
  files::path path_;
};

// One forward problem with a single launch, whose buffers the test chooses.
struct Forward {
  explicit Forward(const Shape& s = {Dtype::kFloat32, 1, 9, 11, 1, 1, 32, 32, false})
      : shape(s), attention(s) {
    plan = std::make_unique<Plan>(Take(kForwardPass.plan(attention.Problem(), PlanContext())));
    CHECK(plan->launches.size() == 1);
  }
  const Launch& launch() const { return plan->launches[0]; }
  std::string kernel() const { return launch().variant->host_name; }
  // As the layer writes them.
  std::string constants() const {
    std::string text;
    for (const FunctionConstant& constant : launch().constants) {
      text += "_" + std::to_string(constant.index) + "-" + std::to_string(constant.value);
    }
    return text;
  }
  Result<const Pipeline*> GetPipeline(Device& device) const {
    return device.GetPipeline(kernel(), launch().constants);
  }
  std::vector<size_t> tensors() const { return kForwardPass.Tensors(attention.Problem()); }
  void Wrap(Device& device) {
    buffers.resize(kNumOperands);
    for (size_t i : tensors()) {
      buffers[i] = Take(device.WrapHostMemory(
          attention.Data(i), attention.Bytes(i),
          kForwardPass.IsResult(i) ? Access::kResult : Access::kOperand));
    }
  }
  // Bound to `buffers`.
  Dispatch MakeDispatch(Device& device, double work = 0) const {
    Dispatch dispatch;
    dispatch.pipeline = Take(GetPipeline(device));
    for (const Binding& binding : launch().bindings) {
      const auto* buffer = buffers[static_cast<size_t>(binding.operand)].get();
      dispatch.buffers.push_back({static_cast<uint32_t>(binding.index), buffer, 0});
    }
    dispatch.bytes.push_back({JFM_BUFFER_PARAMS, &launch().params, sizeof(launch().params)});
    dispatch.threadgroups = launch().threadgroups;
    dispatch.threads_per_threadgroup = launch().threads_per_threadgroup;
    dispatch.work = work;
    return dispatch;
  }
  // What the software device makes of the same numbers.
  Attention Expected() const {
    Attention expected(shape);
    CheckOk(expected.Run(SoftwareDevice(), kForwardPass));
    return expected;
  }
  bool IsDone() {
    Attention expected = Expected();
    return attention == expected;
  }

  Shape shape;
  Attention attention;
  std::unique_ptr<Plan> plan;
  std::vector<std::unique_ptr<Buffer>> buffers;  // by Operand
};

// ---- Attention -----------------------------------------------------------------------

// The software device and this one plan for the same GPU, or their bits would differ.
constexpr int kFamily = 0;

const Shape kShapes[] = {
    {},
    {Dtype::kFloat16, 2, 37, 53, 6, 3, 32, 32, true},
    {Dtype::kBfloat16, 1, 70, 130, 2, 1, 256, 31, true},
    {Dtype::kFloat32, 1, 5, 300, 4, 2, 200, 256, false},  // few queries: the split kernels
    {Dtype::kFloat16, 1, 9, 5, 1, 1, 7, 5, false},        // all smaller than a page
    {Dtype::kFloat32, 0, 4, 4, 1, 1, 32, 32, false},      // nothing to do
    {Dtype::kFloat32, 2, 37, 53, 6, 3, 32, 32, true, true},  // all options and operands
    {Dtype::kBfloat16, 1, 5, 130, 2, 1, 32, 32, false, true},
};

void RunsAttention() {
  const std::unique_ptr<Device> device = Open();
  for (int family : {9, kFamily}) {
    SetGpuFamily(family);
    for (const Shape& shape : kShapes) {
      for (size_t shift : {0, 16}) {
        Attention expected(shape, shift), got(shape, shift);
        CheckOk(expected.Run(SoftwareDevice()));
        CheckOk(got.Run(*device));
        CHECK(got == expected);
      }
    }
  }
}

void RunsAttentionInThreads() {
  const std::unique_ptr<Device> device = Open();
  std::vector<Attention> expected;
  for (const Shape& shape : kShapes) {
    expected.emplace_back(shape);
    CheckOk(expected.back().Run(SoftwareDevice()));
  }
  Calls libraries(kNewLibrary), archives(kNewArchive);
  std::set<const char*> kernels;
  InThreads(4, [&](int thread) {
    for (size_t i = 0; i < std::size(kShapes); ++i) {
      const size_t shape = (i + static_cast<size_t>(thread) / 2) % std::size(kShapes);
      Attention got(kShapes[shape]);
      CheckOk(got.Run(*device));
      CHECK(got == expected[shape]);
    }
  });
  // Each pipeline is made once, whoever asks.
  const int64_t made = libraries.count();
  CHECK(made > 0 && archives.count() == 0);
  for (const Shape& shape : kShapes) CheckOk(Attention(shape).Run(*device));
  CHECK(libraries.count() == made);
}

void RunsAttentionInParts() {
  // Launches of little work, and so command buffers of few launches.
  const std::unique_ptr<Device> device = Open();
  SetMaxLaunchWork(1e5);
  Attention expected{Shape{}}, got{Shape{}};
  CheckOk(expected.Run(SoftwareDevice()));
  CheckOk(got.Run(*device));
  SetMaxLaunchWork(0);
  CHECK(got == expected);
}

void IsTheDefaultDevice() {
  Device* device = Take(DefaultDevice());
  CHECK(device == Take(AppleDevice()));
  CheckOk(Attention(Shape{}).Run(*device));
}

// ---- Facts ---------------------------------------------------------------------------

void HasFacts() {
  for (int family : {1007, 1008, 1009, 1010}) {
    fake_metal_set_fact("family", family);
    const DeviceFacts facts = Open()->facts();
    CHECK(facts.family == "Apple" + std::to_string(family - 1000));
    SetGpuFamily(-1);
    CHECK(CurrentContext(facts).gpu_family == family - 1000);
    SetGpuFamily(kFamily);
    CHECK(CurrentContext(facts).gpu_family == kFamily);
  }
  fake_metal_set_fact("maxThreadgroupMemoryLength", 30000);
  fake_metal_set_fact("maxBufferLength", int64_t{1} << 35);
  fake_metal_set_fact("recommendedMaxWorkingSetSize", int64_t{1} << 36);
  fake_metal_set_fact("gpu_core_count", 38);
  const std::unique_ptr<Device> device = Open();
  const DeviceFacts& facts = device->facts();
  CHECK(facts.name == "Apple M3 Fake");
  CHECK(facts.system == "macOS Version 14.6 (Build 23G80)");
  CHECK(facts.max_threadgroup_memory_bytes == 30000);
  CHECK(facts.max_threads_per_threadgroup == 1024);
  CHECK(facts.max_buffer_bytes == uint64_t{1} << 35);
  CHECK(facts.memory_limit_bytes == uint64_t{1} << 36);
  CHECK(facts.num_cores == 38 && facts.has_unified_memory);
  fake_metal_set_fact("gpu_core_count", 0);
  CHECK(Open()->facts().num_cores == 0);
  fake_metal_set_fact("gpu_core_count", -1);  // no number
  CHECK(Open()->facts().num_cores == 0);
  fake_metal_set_fact("gpu_core_count", 38);
  fake_metal_set_fact("has_gpu_service", 0);
  CHECK(Open()->facts().num_cores == 0);
  fake_metal_set_fact("has_gpu_service", 1);
  apple::runtime.has_iokit = false;
  CHECK(Open()->facts().num_cores == 0);
  apple::runtime.has_iokit = true;
  CHECK(Open()->facts().num_cores == 38);
  fake_metal_set_fact("hasUnifiedMemory", 0);
  CHECK(!Open()->facts().has_unified_memory);
}

void RefusesDevices() {
  fake_metal_set_fact("has_device", 0);
  CheckError(OpenAppleDevice().status(), Code::kNotFound, "no Metal device: ");
  fake_metal_set_fact("has_device", 1);
  fake_metal_set_fact("family", 1006);
  CheckError(OpenAppleDevice().status(), Code::kUnimplemented,
             "Apple7 (M1) or newer, which Apple M3 Fake is not");
  fake_metal_set_fact("family", 1007);
  Fail("newCommandQueue", FAKE_METAL_NIL);
  CheckError(OpenAppleDevice().status(), Code::kInternal, "no command queue");
}

// ---- Pipelines -----------------------------------------------------------------------

void ReportsCompilers() {
  const std::unique_ptr<Device> device = Open();
  const Forward forward;
  const auto fails = [&](Code code, const std::string& message) {
    CheckError(forward.GetPipeline(*device).status(), code, message);
  };
  CheckError(device->GetPipeline("no_such_kernel", {}).status(), Code::kNotFound,
             "no Metal kernel named 'no_such_kernel'");
  Fail(kNewLibrary, FAKE_METAL_ERROR, "program_source:3:1: error: planted\nsecond line");
  fails(Code::kInternal, "the Metal compiler rejects " + forward.kernel() +
                             ": program_source:3:1: error: planted\nsecond line");
  Fail(kNewLibrary, FAKE_METAL_NIL);
  fails(Code::kInternal, forward.kernel() + ": Metal gives no reason");
  Fail(kNewFunction, FAKE_METAL_ERROR, "no such constant");
  fails(Code::kInternal, "cannot specialise " + forward.kernel() +
                             " for the function constants" + forward.constants() +
                             ": no such constant");
  Fail(kNewPipeline, FAKE_METAL_ERROR, "too many registers");
  fails(Code::kInternal, "a pipeline of " + forward.kernel() + ": too many registers");
  fake_metal_set_fact("threadExecutionWidth", 64);
  fails(Code::kUnimplemented, "needs simdgroups of 32 threads, but has 64 on Apple M3 Fake");
  fake_metal_set_fact("threadExecutionWidth", 32);
  fake_metal_set_fact("staticThreadgroupMemoryLength", 40000);
  fails(Code::kUnimplemented,
        "needs 40000 bytes of threadgroup memory, but Apple M3 Fake has 32768");
  fake_metal_reset();
  // A compiler's warning is no error; and after errors it is tried again, and then kept.
  Fail(kNewLibrary, FAKE_METAL_WARNING, "unused variable");
  Calls libraries(kNewLibrary);
  const Pipeline* pipeline = Take(forward.GetPipeline(*device));
  CHECK(pipeline == Take(forward.GetPipeline(*device)) && libraries.count() == 1);
  // Other constants are another pipeline.
  std::vector<FunctionConstant> constants = forward.launch().constants;
  constants[0].value = 1;
  CHECK(pipeline != Take(device->GetPipeline(forward.kernel(), constants)));
}

// A pipeline by a new device, as another process would; whether it came from an archive.
bool ComesFromArchive(const std::string& folder, bool is_causal = false) {
  const std::unique_ptr<Device> device = Open();
  device->SetCacheFolder(folder);
  Shape shape{Dtype::kFloat32, 1, 9, 11, 1, 1, 32, 32, is_causal};
  Forward forward(shape);
  const int64_t compiled = fake_metal_compiled_pipelines();
  const Calls additions(kAddToArchive);
  CheckOk(forward.GetPipeline(*device).status());
  const bool is_archived = fake_metal_compiled_pipelines() == compiled && additions.count() == 0;
  // Whatever happens on disk, it works.
  CheckOk(forward.attention.Run(*device, kForwardPass));
  CHECK(forward.IsDone());
  return is_archived;
}

void KeepsPipelines() {
  const TemporaryFolder temporary;
  const std::string folder = (temporary.path() / "cache").string();
  const int64_t compiled = fake_metal_compiled_pipelines();
  const int syncs = num_syncs;
  CHECK(!ComesFromArchive(folder));
  CHECK(num_syncs == syncs + 1);
  CHECK(fake_metal_compiled_pipelines() == compiled);  // but for the archive, and only once
  std::vector<files::path> found = temporary.Files();
  CHECK(found.size() == 1);
  const files::path path = found[0], key = path.parent_path();
  const Forward forward;
  CHECK(path.filename() == forward.kernel() + forward.constants() + ".metalarchive");
  CHECK(forward.constants().substr(0, 30) == "_0-0_1-0_2-0_3-32_4-32_5-0_6-0");
  CHECK(key.parent_path() == files::path(folder) / "metal");
  const std::string name = key.filename().string();
  CHECK(name.size() == 33 && name.substr(0, 17) == apple::MslDigest().substr(0, 16) + "-");
  CHECK(ComesFromArchive(folder));
  CHECK(ComesFromArchive(folder));
  CHECK(!ComesFromArchive(folder, true));  // other constants, another file
  CHECK(ComesFromArchive(folder, true));
  found = temporary.Files();
  CHECK(found.size() == 2);

  // A file that is not an archive, and one of another pipeline: ignored and written anew.
  files::resize_file(path, 10);
  CHECK(!ComesFromArchive(folder));
  CHECK(ComesFromArchive(folder));
  files::copy_file(found[0] == path ? found[1] : found[0], path,
                   files::copy_options::overwrite_existing);
  CHECK(!ComesFromArchive(folder));
  CHECK(ComesFromArchive(folder));

  // Another system, another GPU: another folder.
  fake_metal_set_text("operatingSystemVersionString", "Version 15.0 (Build 24A1)");
  CHECK(!ComesFromArchive(folder));
  fake_metal_set_text("name", "Apple M9 Fake");
  CHECK(!ComesFromArchive(folder));
  CHECK(temporary.Files().size() == 4);
}

void DoesWithoutArchives() {
  const TemporaryFolder temporary;
  const std::string folder = temporary.path().string();
  for (const char* selector : {kNewArchive, kAddToArchive, kWriteArchive}) {
    for (int mode : {FAKE_METAL_ERROR, FAKE_METAL_NIL}) {
      Fail(selector, mode);
      CHECK(!ComesFromArchive(folder));
      CHECK(temporary.Files().empty());
    }
  }
  CHECK(!ComesFromArchive(""));
  CHECK(!ComesFromArchive("/dev/null/no/folder"));
  CHECK(!ComesFromArchive(folder + "/\xff"));  // not UTF-8
  CHECK(temporary.Files().empty());
  // The rename fails, for there is a folder of that name; nothing is left over.
  CHECK(!ComesFromArchive(folder));
  const files::path path = temporary.Files()[0];
  files::remove(path);
  files::create_directories(path / "in the way");
  CHECK(!ComesFromArchive(folder));
  CHECK(temporary.Files().empty());
}

// ---- Buffers -------------------------------------------------------------------------

void WrapsHostMemory() {
  const std::unique_ptr<Device> device = Open();
  const Pages pages(4);
  Calls aliases(kAlias), copies(kNewBuffer);
  const auto wrap = [&](size_t begin, size_t size, Access access = Access::kOperand) {
    std::unique_ptr<Buffer> buffer =
        Take(device->WrapHostMemory(pages.data() + begin, size, access));
    CHECK(buffer->size_bytes() == size && buffer->native() == nullptr);
  };
  for (size_t begin : {size_t{0}, size_t{16}, kPage - 2}) {
    wrap(begin, kPage);
    wrap(begin, kPage + 1, Access::kResult);
    wrap(begin, 2 * kPage);
  }
  CHECK(aliases.count() == 9 && copies.count() == 0);
  for (size_t size : {size_t{1}, kPage - 1}) {
    wrap(100, size);
    wrap(100, size, Access::kResult);
  }
  CHECK(aliases.count() == 9 && copies.count() == 4);
  wrap(0, 0);
  CHECK(Take(device->WrapHostMemory(nullptr, 0, Access::kResult))->size_bytes() == 0);
  CheckError(device->WrapHostMemory(nullptr, 12, Access::kOperand).status(), Code::kInvalidArgument,
             "host memory of 12 bytes must have an address");
  // What Metal will not alias is copied; and what it says is an alias, but is none.
  for (int mode : {FAKE_METAL_NIL, FAKE_METAL_EMPTY_ALIAS, FAKE_METAL_FALSE_ALIAS}) {
    Fail(kAlias, mode);
    wrap(0, 2 * kPage);
  }
  CHECK(aliases.count() == 12 && copies.count() == 9);
  Fail(kAlias, FAKE_METAL_NIL);
  Fail(kNewBuffer, FAKE_METAL_NIL, "", 2);
  CheckError(device->WrapHostMemory(pages.data(), kPage, Access::kOperand).status(),
             Code::kResourceExhausted, "out of memory: Apple M3 Fake has no buffer of ");
}

void CopiesResultsBack() {
  const std::unique_ptr<Device> device = Open();
  constexpr int kNoFailure = -1;
  for (int mode : {kNoFailure, int{FAKE_METAL_NIL}, int{FAKE_METAL_EMPTY_ALIAS},
                   int{FAKE_METAL_FALSE_ALIAS}}) {
    Forward forward;  // all smaller than a page
    if (mode != kNoFailure) {
      forward.shape.q_len = forward.shape.kv_len = 300;
      forward = Forward(forward.shape);
      Fail(kAlias, mode, "", 5);
    }
    forward.Wrap(*device);
    fake_metal_clear_failures();
    // Operands were read when they were wrapped.
    Attention before(forward.shape);
    std::memset(forward.attention.Data(0), 0xff, forward.attention.Bytes(0));
    const std::unique_ptr<CommandBuffer> commands = device->NewCommandBuffer();
    CheckOk(commands->Encode(forward.MakeDispatch(*device)));
    CheckOk(commands->Encode(forward.MakeDispatch(*device)));
    CheckOk(commands->Commit());
    fake_metal_drain();
    const auto out = static_cast<size_t>(Operand::kOut);
    CHECK(std::memcmp(forward.attention.Data(out), before.Data(out), before.Bytes(out)) == 0);
    CheckOk(commands->Wait());
    std::memcpy(forward.attention.Data(0), before.Data(0), before.Bytes(0));
    CHECK(forward.IsDone());
  }
  // Bytes of a result that no kernel writes stay as they are.
  std::vector<char> memory(100, 'x');
  Forward forward;
  forward.Wrap(*device);
  forward.buffers.push_back(Take(device->WrapHostMemory(memory.data(), 100, Access::kResult)));
  Dispatch dispatch = forward.MakeDispatch(*device);
  dispatch.buffers.push_back({30, forward.buffers.back().get(), 99});
  const std::unique_ptr<CommandBuffer> commands = device->NewCommandBuffer();
  CheckOk(commands->Encode(dispatch));
  CheckOk(commands->Commit());
  CheckOk(commands->Wait());
  CHECK(memory == std::vector<char>(100, 'x') && forward.IsDone());
}

void Allocates() {
  fake_metal_set_fact("maxBufferLength", 1 << 20);
  fake_metal_set_fact("recommendedMaxWorkingSetSize", 1 << 22);
  const std::unique_ptr<Device> device = Open();
  {
    const std::unique_ptr<Buffer> buffer = Take(device->Allocate(1000));
    CHECK(buffer->size_bytes() == 1000 && fake_metal_buffer_length(buffer->native()) == 1000);
    void* object = buffer->native();
    CHECK(fake_metal_references(object) == 1);
    fake_metal_retain(object);  // it may be given to others, and is never reused
    {
      const std::unique_ptr<Buffer> other = Take(device->Allocate(1000));
      CHECK(other->native() != object);
    }
    fake_metal_release(object);
  }
  CHECK(Take(device->Allocate(0))->size_bytes() == 0);
  const char* limits = "up to 1048576 and all together should stay below 4194304";
  CheckError(device->Allocate((1 << 20) + 1).status(), Code::kResourceExhausted, limits);
  CheckError(device->AllocateScratch(1 << 30).status(), Code::kResourceExhausted, limits);
  // Too long for Metal even as an alias.
  const size_t size = (1 << 20) + 1;
  const Pages pages(size / kPage + 1);
  CheckError(device->WrapHostMemory(pages.data(), size, Access::kOperand).status(),
             Code::kResourceExhausted, "no buffer of 1048577 bytes");
  // What the pool holds is given up before an error.
  fake_metal_set_memory_limit(100000);
  Take(device->AllocateScratch(60000));
  CHECK(Take(device->Allocate(80000))->size_bytes() == 80000);
  CheckError(device->Allocate(100001).status(), Code::kResourceExhausted, "100001 bytes");
}

void PoolsScratch() {
  fake_metal_set_fact("recommendedMaxWorkingSetSize", 80000);  // so at most 10000 idle
  const std::unique_ptr<Device> device = Open();
  Calls made(kNewBuffer);
  const auto scratch = [&](size_t size) { return Take(device->AllocateScratch(size)); };
  void* first = scratch(4000)->native();
  {
    const std::unique_ptr<Buffer> same = scratch(2000), other = scratch(2000);
    CHECK(same->native() == first && same->size_bytes() == 2000 && other->native() != first);
    CHECK(made.count() == 2);
  }
  CHECK(scratch(2000)->native() != first);  // the smallest that fits
  CHECK(scratch(2001)->native() == first);
  CHECK(made.count() == 2);
  CHECK(scratch(1000) != nullptr && made.count() == 2);
  CHECK(scratch(999) != nullptr && made.count() == 3);    // 2000 is more than twice that
  CHECK(scratch(4001) != nullptr && made.count() == 4);   // idle: 4000, 2000, 999 and this: over
  CHECK(!fake_metal_is_alive_buffer(first));              // the oldest went
  CHECK(scratch(20000) != nullptr && made.count() == 5);  // never kept, and all others went
  CHECK(scratch(999) != nullptr && made.count() == 6);
}

void WrapsNativeBuffers() {
  const std::unique_ptr<Device> device = Open();
  void* object = fake_metal_new_buffer(100, 1);
  {
    const std::unique_ptr<Buffer> buffer = Take(device->WrapNative(object, 99));
    CHECK(buffer->native() == object && buffer->size_bytes() == 99);
    CHECK(fake_metal_references(object) == 2);
  }
  CHECK(fake_metal_references(object) == 1);
  CheckError(device->WrapNative(object, 101).status(), Code::kInvalidArgument,
             "at least 101 bytes was expected, but got one of 100");
  for (int mode : {FAKE_METAL_NIL, FAKE_METAL_OTHER_DEVICE}) {
    Fail("device", mode);
    CheckError(device->WrapNative(object, 100).status(), Code::kInvalidArgument,
               "a Metal buffer of Apple M3 Fake was expected, but got one of another device");
  }
  Fail("device", FAKE_METAL_WRAPPED_DEVICE);
  CHECK(Take(device->WrapNative(object, 100))->native() == object);
  CheckError(device->WrapNative(nullptr, 100).status(), Code::kInvalidArgument,
             "a Metal buffer of 100 bytes was expected, but got a null pointer");
  CHECK(Take(device->WrapNative(nullptr, 0))->size_bytes() == 0);
  CHECK(fake_metal_references(object) == 1);
  fake_metal_release(object);

  // Attention from private buffers to private buffers, as over jax-metal.
  Forward forward;
  std::map<size_t, void*> objects;
  forward.buffers.resize(kNumOperands);
  for (size_t i : forward.tensors()) {
    const size_t size = forward.attention.Bytes(i);
    objects[i] = fake_metal_new_buffer(size, 1);
    std::memcpy(fake_metal_buffer_bytes(objects[i]), forward.attention.Data(i), size);
    forward.buffers[i] = Take(device->WrapNative(objects[i], size));
  }
  const std::unique_ptr<CommandBuffer> commands = device->NewCommandBuffer();
  CheckOk(commands->Encode(forward.MakeDispatch(*device)));
  CheckOk(commands->Commit());
  CheckOk(commands->Wait());
  for (const auto& [i, object] : objects) {
    std::memcpy(forward.attention.Data(i), fake_metal_buffer_bytes(object),
                forward.attention.Bytes(i));
    fake_metal_release(object);
  }
  CHECK(forward.IsDone());
}

// ---- Command buffers -----------------------------------------------------------------

void ChecksDispatches() {
  const std::unique_ptr<Device> device = Open();
  Forward forward;
  forward.Wrap(*device);
  const Dispatch good = forward.MakeDispatch(*device);
  const std::unique_ptr<CommandBuffer> commands = device->NewCommandBuffer();
  const auto fails = [&](const Dispatch& dispatch, const std::string& message) {
    CheckError(commands->Encode(dispatch), Code::kInvalidArgument,
               forward.kernel() + ": " + message);
  };
  Dispatch bad = good;
  bad.threads_per_threadgroup = {1, 0, 1};
  fails(bad, "a threadgroup must have 1 to 1024 threads on Apple M3 Fake, but got 0");
  bad.threads_per_threadgroup = {1025, 1, 1};
  fails(bad, "a threadgroup must have 1 to 1024 threads on Apple M3 Fake, but got 1025");
  bad = good;
  bad.buffers[1].index = 31;
  fails(bad, "buffer 31 is beyond the last index, 30");
  bad = good;
  bad.buffers[1].buffer = nullptr;
  fails(bad, "buffer 2 is missing");
  bad = good;
  bad.buffers[1].offset_bytes = forward.buffers[1]->size_bytes();
  fails(bad, "buffer 2 has an offset of 1408 bytes, but only 1408 bytes");
  bad = good;
  bad.bytes[0].index = 31;
  fails(bad, "the constants at index 31 are beyond the last index, 30");
  bad = good;
  bad.bytes[0].size_bytes = 0;
  fails(bad, "the constants at index 0 must have 1 to 4096 bytes, but got 0");
  const std::vector<char> large(4097);
  bad.bytes[0] = {0, large.data(), large.size()};
  fails(bad, "the constants at index 0 must have 1 to 4096 bytes, but got 4097");
  Calls begun("commandBuffer");
  bad = good;
  bad.threadgroups = {1, 0, 1};
  CheckOk(commands->Encode(bad));  // nothing to do
  CheckOk(commands->Commit());
  CheckOk(commands->Wait());
  CHECK(begun.count() == 0);
  // What was wrong leaves no trace.
  CheckOk(commands->Encode(good));
  CheckError(commands->Wait(), Code::kInternal, "must be committed before it is waited for");
  CheckOk(commands->Commit());
  CheckOk(commands->Commit());
  CheckOk(commands->Wait());
  CheckOk(commands->Wait());
  CHECK(begun.count() == 1 && forward.IsDone());
  // The pipeline's own limit, which depends on its registers.
  fake_metal_set_fact("maxTotalThreadsPerThreadgroup", 64);
  const std::unique_ptr<Device> smaller = Open();
  Forward other;
  other.Wrap(*smaller);
  CheckError(smaller->NewCommandBuffer()->Encode(other.MakeDispatch(*smaller)),
             Code::kInvalidArgument, "must have 1 to 64 threads on Apple M3 Fake, but got 128");
}

void DividesLongWork() {
  const std::unique_ptr<Device> device = Open();
  Forward forward;
  forward.Wrap(*device);
  const double max = kMaxWorkAtOnce;
  Calls commits("commit");
  const auto run = [&](const std::vector<double>& works, int64_t expected_commits) {
    const int64_t before = commits.count();
    const std::unique_ptr<CommandBuffer> commands = device->NewCommandBuffer();
    for (double work : works) CheckOk(commands->Encode(forward.MakeDispatch(*device, work)));
    CheckOk(commands->Commit());
    CheckOk(commands->Wait());
    CHECK(commits.count() - before == expected_commits);
    CHECK(forward.IsDone());
  };
  // An M1 with 7 cores, of whose peak a kernel reaches 15 %: 0.3 s at most.
  CHECK(max / (0.15 * 2.3e12) <= 0.3);
  run({0, 0, 0}, 1);
  run({max / 2, max / 2}, 1);
  run({max / 2, max / 2, 1}, 2);
  run({3 * max, 0, max, max / 2}, 3);
  run({0, 3 * max, 3 * max}, 2);
}

void RefusesToBegin() {
  const std::unique_ptr<Device> device = Open();
  Forward forward;
  forward.Wrap(*device);
  for (const char* selector : {"commandBuffer", "computeCommandEncoder"}) {
    Fail(selector, FAKE_METAL_NIL);
    const std::unique_ptr<CommandBuffer> commands = device->NewCommandBuffer();
    CheckError(commands->Encode(forward.MakeDispatch(*device)), Code::kResourceExhausted,
               "Apple M3 Fake gives no command buffer");
    CheckOk(commands->Encode(forward.MakeDispatch(*device)));  // and again
    CheckOk(commands->Commit());
    CheckOk(commands->Wait());
    CHECK(forward.IsDone());
  }
}

void ReportsGpuErrors() {
  const std::unique_ptr<Device> device = Open();
  const struct {
    int mode;
    const char* reason;
    Code code;
    const char* text;
  } errors[] = {
      {FAKE_METAL_RUN_ERROR, "planted", Code::kInternal, " (MTLCommandBufferError 1)."},
      {FAKE_METAL_RUN_TIMEOUT, "planted", Code::kDeadlineExceeded,
       " (MTLCommandBufferError 2). macOS ends GPU work that takes seconds or keeps the screen "
       "waiting: a smaller batch may help, and so may AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1"},
      {FAKE_METAL_RUN_PAGE_FAULT, "planted", Code::kInternal, " (MTLCommandBufferError 3)."},
      {FAKE_METAL_RUN_OUT_OF_MEMORY, "planted", Code::kResourceExhausted,
       " (MTLCommandBufferError 8). All buffers together should stay below 17179869184"},
      {FAKE_METAL_RUN_REVOKED, "planted", Code::kUnavailable,
       " (MTLCommandBufferError 4). This work did nothing wrong: macOS does not take any more"},
      {FAKE_METAL_RUN_NO_ERROR, "Metal gives no reason", Code::kInternal,
       " (MTLCommandBufferError 0)."},
      // What the driver says without a code of Metal's for it.
      {FAKE_METAL_RUN_ERROR,
       "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
       Code::kDeadlineExceeded, " (MTLCommandBufferError 1). macOS ends GPU work that takes"},
      {FAKE_METAL_RUN_ERROR, "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
       Code::kDeadlineExceeded, " (MTLCommandBufferError 1). macOS ends GPU work that takes"},
      {FAKE_METAL_RUN_ERROR, "Impacting Interactivity", Code::kDeadlineExceeded,
       " (MTLCommandBufferError 1). macOS ends GPU work that takes"},
      {FAKE_METAL_RUN_ERROR, "Discarded (victim of GPU error/recovery)", Code::kUnavailable,
       " (MTLCommandBufferError 1). This work did nothing wrong: macOS restarted the GPU"},
      {FAKE_METAL_RUN_ERROR, "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)",
       Code::kUnavailable, " (MTLCommandBufferError 1). This work did nothing wrong: macOS rest"},
      {FAKE_METAL_RUN_ERROR,
       "Ignored (for causing prior/excessive GPU errors) "
       "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)",
       Code::kUnavailable, " (MTLCommandBufferError 1). This work did nothing wrong: macOS does"},
  };
  for (const auto& error : errors) {
    Forward forward;
    forward.Wrap(*device);
    const std::unique_ptr<CommandBuffer> commands = device->NewCommandBuffer();
    CheckOk(commands->Encode(forward.MakeDispatch(*device)));
    Fail("commit", error.mode, error.reason);
    CheckOk(commands->Commit());
    const auto out = static_cast<size_t>(Operand::kOut);
    std::memset(forward.attention.Data(out), 'x', forward.attention.Bytes(out));
    CheckError(commands->Wait(), error.code,
               "Apple M3 Fake failed in " + forward.kernel() + ": " + error.reason + error.text);
    for (size_t i = 0; i < forward.attention.Bytes(out); ++i) {
      CHECK(forward.attention.Data(out)[i] == 'x');  // nothing is copied back
    }
  }
  // Of several, the first; with the names of its kernels, each once.
  Forward forward, causal({Dtype::kFloat16, 1, 9, 11, 1, 1, 32, 32, true});
  forward.Wrap(*device);
  causal.Wrap(*device);
  const double max = kMaxWorkAtOnce;
  const std::unique_ptr<CommandBuffer> commands = device->NewCommandBuffer();
  Fail("commit", FAKE_METAL_RUN_PAGE_FAULT, "the first", 1, 1);
  Fail("commit", FAKE_METAL_RUN_TIMEOUT, "the second");
  CheckOk(commands->Encode(forward.MakeDispatch(*device, max)));
  CheckOk(commands->Encode(forward.MakeDispatch(*device, max / 4)));
  CheckOk(commands->Encode(causal.MakeDispatch(*device, max / 4)));
  CheckOk(commands->Encode(forward.MakeDispatch(*device, max / 4)));
  CheckOk(commands->Encode(forward.MakeDispatch(*device, max)));
  CheckOk(commands->Commit());
  CheckError(commands->Wait(), Code::kInternal,
             "failed in " + forward.kernel() + ", " + causal.kernel() +
                 ": the first (MTLCommandBufferError 3)");
  CheckOk(commands->Wait());  // it was told
}

// The GPU does nothing until a while after ReleaseSoon().
class HeldGpu {
 public:
  HeldGpu() {
    fake_metal_hold(1);
    thread_ = std::thread([this] {
      while (!is_wanted_) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      is_released_ = true;
      fake_metal_hold(0);
    });
  }
  ~HeldGpu() { thread_.join(); }
  void ReleaseSoon() { is_wanted_ = true; }
  bool is_released() const { return is_released_; }

 private:
  std::atomic<bool> is_wanted_{false}, is_released_{false};
  std::thread thread_;
};

void WaitsForTheGpu() {
  const std::unique_ptr<Device> device = Open();
  Forward forward;
  forward.Wrap(*device);
  {
    HeldGpu gpu;
    const std::unique_ptr<CommandBuffer> commands = device->NewCommandBuffer();
    CheckOk(commands->Encode(forward.MakeDispatch(*device)));
    CheckOk(commands->Commit());  // does not wait
    gpu.ReleaseSoon();
    CheckOk(commands->Wait());
    CHECK(gpu.is_released() && forward.IsDone());
  }
  // Destroyed without Wait(): waits as well, for the GPU still uses the buffers.
  const double max = kMaxWorkAtOnce;
  for (bool is_committed : {false, true}) {
    HeldGpu gpu;
    {
      const std::unique_ptr<CommandBuffer> commands = device->NewCommandBuffer();
      CheckOk(commands->Encode(forward.MakeDispatch(*device, max)));
      CheckOk(commands->Encode(forward.MakeDispatch(*device, max)));  // commits the first
      if (is_committed) CheckOk(commands->Commit());
      gpu.ReleaseSoon();
    }
    CHECK(gpu.is_released());
  }
  // Never committed, with and without an encoder.
  CheckOk(device->NewCommandBuffer()->Encode(forward.MakeDispatch(*device)));
  device->NewCommandBuffer();
}

void HandlersOutliveWhoWaits() {
  const std::unique_ptr<Device> device = Open();  // and so the runtime
  auto completion = std::make_shared<apple::Completion>();
  apple::Block handler = completion->NewHandler();
  const std::weak_ptr<apple::Completion> alive = completion;
  completion.reset();
  CHECK(!alive.expired());
  reinterpret_cast<void (*)(apple::Block*, apple::id)>(handler.invoke)(&handler, nullptr);
  CHECK(alive.expired());
}

// ---- Without a runtime: each in a process of its own ---------------------------------

void FailsToOpen(Code code, const std::string& message) {
  CheckError(OpenAppleDevice().status(), code, message);
  CheckError(AppleDevice().status(), code, message);
  CheckError(DefaultDevice().status(), code, message);
}

void NamesNoLibrary() {
  unsetenv("JFM_FAKE_METAL_LIBRARY");
  FailsToOpen(Code::kFailedPrecondition, "there is no Metal on this system");
}

void NamesNoFile() {
  setenv("JFM_FAKE_METAL_LIBRARY", "/no/such/library", 1);
  FailsToOpen(Code::kNotFound, "Metal cannot be loaded: /no/such/library: ");
  CheckError(OpenAppleDevice().status(), Code::kNotFound, ", the libraries lack objc_getClass, ");
}

void LacksFunctions() {
  setenv("JFM_FAKE_METAL_LIBRARY", "libm.so.6", 1);
  FailsToOpen(Code::kNotFound,
              "lack objc_getClass, sel_registerName, objc_msgSend, objc_autoreleasePoolPush, "
              "objc_autoreleasePoolPop, MTLCreateSystemDefaultDevice, _NSConcreteStackBlock.");
}

std::string no_classes_library;

void LacksClasses() {
  setenv("JFM_FAKE_METAL_LIBRARY", no_classes_library.c_str(), 1);
  FailsToOpen(Code::kNotFound, "Metal lacks the classes NSArray, NSProcessInfo, ");
}

struct Case {
  const char* name;
  void (*run)();
};
constexpr Case kCases[] = {
    {"RunsAttention", RunsAttention},
    {"RunsAttentionInThreads", RunsAttentionInThreads},
    {"RunsAttentionInParts", RunsAttentionInParts},
    {"HasFacts", HasFacts},
    {"RefusesDevices", RefusesDevices},
    {"ReportsCompilers", ReportsCompilers},
    {"KeepsPipelines", KeepsPipelines},
    {"DoesWithoutArchives", DoesWithoutArchives},
    {"WrapsHostMemory", WrapsHostMemory},
    {"CopiesResultsBack", CopiesResultsBack},
    {"Allocates", Allocates},
    {"PoolsScratch", PoolsScratch},
    {"WrapsNativeBuffers", WrapsNativeBuffers},
    {"ChecksDispatches", ChecksDispatches},
    {"DividesLongWork", DividesLongWork},
    {"RefusesToBegin", RefusesToBegin},
    {"ReportsGpuErrors", ReportsGpuErrors},
    {"WaitsForTheGpu", WaitsForTheGpu},
    {"HandlersOutliveWhoWaits", HandlersOutliveWhoWaits},
};
// The default device lives on, and the others need a process without a runtime.
constexpr Case kAlone[] = {
    {"IsTheDefaultDevice", IsTheDefaultDevice},
    {"NamesNoLibrary", NamesNoLibrary},
    {"NamesNoFile", NamesNoFile},
    {"LacksFunctions", LacksFunctions},
    {"LacksClasses", LacksClasses},
};

// Runs a case, after which no object may be left that was not there before.
void RunBalanced(const Case& test) {
  const int64_t objects = fake_metal_live_objects(), devices = fake_metal_device_references();
  test.run();
  fake_metal_drain();
  if (fake_metal_live_objects() != objects || fake_metal_device_references() != devices) {
    std::fprintf(stderr, "%s leaves objects: %s\n", test.name, fake_metal_live_text());
    std::exit(1);
  }
  fake_metal_reset();
  std::printf("%s: good\n", test.name);
}

}  // namespace
}  // namespace jfm

int main(int argc, char** argv) {
  setenv("JFM_FAKE_METAL_LIBRARY", "", 1);
  jfm::SetGpuFamily(jfm::kFamily);
  jfm::no_classes_library = argc > 1 ? argv[1] : "";
  const std::string wanted = argc > 2 ? argv[2] : "";
  bool found = wanted == "list";
  for (const jfm::Case& test : jfm::kCases) {
    if (wanted == "list") std::puts(test.name);
    if (!wanted.empty() && wanted != test.name) continue;
    jfm::RunBalanced(test);
    found = true;
  }
  for (const jfm::Case& test : jfm::kAlone) {
    if (wanted == "list") std::puts(test.name);
    if (wanted != test.name) continue;
    test.run();
    found = true;
  }
  CHECK(found);
  std::puts("apple: good");
  return 0;
}
