// Source -> library -> specialised function -> pipeline, and the archives on disk, which save
// the last and longest of these steps.
#include "plugin/device/apple/pipeline_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>

#include "plugin/device/apple/constants.h"
#include "plugin/device/apple/kernel_sources.h"
#include "plugin/device/apple/selectors.h"

namespace jfm::apple {
namespace {

// The kernels count on it; true of every Apple GPU so far.
constexpr NSUInteger kSimdWidth = 32;

// "_0-1_3-64": index and value of each constant. A part of file names.
std::string ConstantsText(const std::vector<FunctionConstant>& constants) {
  std::string text;
  for (const FunctionConstant& c : constants) {
    text += "_" + std::to_string(c.index) + "-" + std::to_string(c.value);
  }
  return text;
}

// FNV-1a, in hexadecimal.
std::string Hash(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016llx", static_cast<uint64>(hash));
  return digits;
}

Ref ConstantValues(const std::vector<FunctionConstant>& constants) {
  Ref values = New(classes::MTLFunctionConstantValues);
  for (const FunctionConstant& c : constants) {
    const bool flag = c.value != 0;
    if (c.type == FunctionConstant::Type::kBool) {
      send::setConstantValue(values.get(), &flag, constants::kBool, c.index);
    } else {
      send::setConstantValue(values.get(), &c.value, constants::kInt, c.index);
    }
  }
  return values;
}

id FileUrl(const std::string& path) { return send::fileURLWithPath(classes::NSURL, String(path)); }

// What was written to `path`, or with no path an empty archive. None on any error: archives
// only save time.
Ref OpenArchive(id device, const std::string& path) {
  Ref descriptor = New(classes::MTLBinaryArchiveDescriptor);
  if (!path.empty()) send::setUrl(descriptor.get(), FileUrl(path));
  id error = nullptr;
  return Ref::Adopt(send::newBinaryArchive(device, descriptor.get(), &error));
}

void UseArchive(id descriptor, const Ref& archive) {
  send::setBinaryArchives(descriptor, send::arrayWithObject(classes::NSArray, archive.get()));
}

bool IsOnDisk(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool is_written = file >= 0 && fsync(file) == 0;
  if (file >= 0) close(file);
  return is_written;
}

// Other processes see the whole file or none, even if the system stops just after this: who
// knows what Metal makes of half a file, and it would meet it at every start.
void WriteArchive(id archive, const std::string& path) {
  const std::string temporary = path + "." + std::to_string(getpid());
  id error = nullptr;
  if (!send::serializeToURL(archive, FileUrl(temporary), &error) || !IsOnDisk(temporary) ||
      std::rename(temporary.c_str(), path.c_str()) != 0) {
    unlink(temporary.c_str());
  }
}

// The pipeline state of `descriptor`; with a path, from the archive there if it holds one, and
// written there if not.
Ref NewState(id device, id descriptor, const std::string& path, id* error) {
  if (!path.empty()) {
    if (access(path.c_str(), R_OK) == 0) {
      if (Ref archive = OpenArchive(device, path)) {
        UseArchive(descriptor, archive);
        Ref state = Ref::Adopt(send::newComputePipelineState(
            device, descriptor, constants::kFailOnArchiveMiss, nullptr, error));
        if (state) return state;
        send::setBinaryArchives(descriptor, nullptr);
      }
    }
    // Adding a function compiles it; the pipeline below is then made from the archive, so
    // that it is compiled once.
    Ref archive = OpenArchive(device, "");
    if (archive && send::addComputePipelineFunctions(archive.get(), descriptor, error)) {
      WriteArchive(archive.get(), path);
      UseArchive(descriptor, archive);
    }
  }
  return Ref::Adopt(
      send::newComputePipelineState(device, descriptor, constants::kNoOption, nullptr, error));
}

}  // namespace

Result<const Pipeline*> PipelineCache::Get(const std::string& kernel,
                                           const std::vector<FunctionConstant>& constants) {
  const Key key = {kernel, ConstantsText(constants)};
  std::unique_lock<std::mutex> map_lock(mutex_);
  Entry& entry = entries_[key];  // stays where it is when others are added
  map_lock.unlock();
  std::lock_guard<std::mutex> lock(entry.mutex);
  if (entry.pipeline == nullptr) {
    Result<std::unique_ptr<ApplePipeline>> made = Make(key, constants);
    if (!made.ok()) return made.status();
    entry.pipeline = std::move(*made);
  }
  return static_cast<const Pipeline*>(entry.pipeline.get());
}

Result<std::unique_ptr<ApplePipeline>> PipelineCache::Make(
    const Key& key, const std::vector<FunctionConstant>& constants) {
  Pool pool;
  const std::string& kernel = key.first;
  const MslKernel* source = FindMslKernel(kernel);
  if (source == nullptr) {
    return Status(Code::kNotFound, "there is no Metal kernel named '" + kernel + "'.");
  }
  id error = nullptr;
  Ref options = New(classes::MTLCompileOptions);
  // Set, because both defaults depend on the system: what the checks of this project saw is
  // what must run. Fast math would let the compiler reorder sums and drop infinities.
  send::setLanguageVersion(options.get(), constants::kLanguage3_1);
  send::setFastMathEnabled(options.get(), false);
  Ref library = Ref::Adopt(
      send::newLibraryWithSource(device_, String(MslText(*source)), options.get(), &error));
  if (!library) {
    return Internal("the Metal compiler rejects " + kernel + ": " + ErrorText(error));
  }
  Ref values = ConstantValues(constants);
  Ref function = Ref::Adopt(send::newFunction(library.get(), String(kernel), values.get(), &error));
  if (!function) {
    return Internal("Metal cannot specialise " + kernel + " for the function constants" +
                    key.second + ": " + ErrorText(error));
  }
  Ref descriptor = New(classes::MTLComputePipelineDescriptor);
  send::setComputeFunction(descriptor.get(), function.get());
  auto pipeline = std::make_unique<ApplePipeline>();
  pipeline->kernel = kernel;
  pipeline->state = NewState(device_, descriptor.get(), ArchivePath(key), &error);
  const id state = pipeline->state.get();
  if (state == nullptr) {
    return Internal("Metal cannot make a pipeline of " + kernel + ": " + ErrorText(error));
  }
  pipeline->max_threads = send::maxTotalThreadsPerThreadgroup(state);
  const NSUInteger width = send::threadExecutionWidth(state);
  if (width != kSimdWidth) {
    return Unimplemented(kernel + " needs simdgroups of " + std::to_string(kSimdWidth) +
                         " threads, but has " + std::to_string(width) + " on " + facts_.name + ".");
  }
  const NSUInteger memory = send::staticThreadgroupMemoryLength(state);
  if (memory > facts_.max_threadgroup_memory_bytes) {
    return Unimplemented(kernel + " needs " + std::to_string(memory) +
                         " bytes of threadgroup memory, but " + facts_.name + " has " +
                         std::to_string(facts_.max_threadgroup_memory_bytes) + ".");
  }
  return pipeline;
}

void PipelineCache::SetFolder(const std::string& folder) {
  std::lock_guard<std::mutex> lock(mutex_);
  folder_ = folder;
}

// Empty where archives cannot be kept. The folder's name changes with all that a compiled
// kernel depends on; old folders are left for whoever cleans the cache.
std::string PipelineCache::ArchivePath(const Key& key) {
  std::string path;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    path = folder_;
  }
  if (path.empty() || String(path) == nullptr) return "";  // nil: not UTF-8, so no URL
  const std::string version =
      MslDigest().substr(0, 16) + "-" + Hash(facts_.name + "\n" + facts_.system);
  for (const std::string& part : {std::string(), std::string("/metal"), "/" + version}) {
    path += part;
    mkdir(path.c_str(), 0777);  // where that fails, writing will
  }
  return path + "/" + key.first + key.second + ".metalarchive";
}

}  // namespace jfm::apple
