// The objects of the fake Metal. Their methods, with Metal's rules, are in device.cc,
// library.cc and commands.cc; the work is done by plugin/device/software.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "plugin/device/device.h"
#include "tests/plugin/device/fake_metal/foundation.h"
#include "tests/plugin/device/fake_metal/kernel_table.h"
#include "tests/plugin/device/fake_metal/runtime.h"

namespace fake {

// ---- Values of Metal's enumerations --------------------------------------------------

constexpr uint64_t kStorageShared = 0, kStorageManaged = 1, kStoragePrivate = 2;
constexpr uint64_t kHazardUntracked = 1;
constexpr uint64_t kFailOnBinaryArchiveMiss = 4;
constexpr uint64_t kLanguageVersion3_1 = 0x30001;
constexpr uint64_t kTypeFloat = 3, kTypeHalf = 16, kTypeInt = 29, kTypeUInt = 33, kTypeShort = 37,
                   kTypeUShort = 41, kTypeChar = 45, kTypeUChar = 49, kTypeBool = 53;

enum CommandBufferStatus : uint64_t {
  kNotEnqueued = 0,
  kEnqueued = 1,
  kCommitted = 2,
  kScheduled = 3,
  kCompleted = 4,
  kFailed = 5,
};

constexpr char kLibraryErrors[] = "MTLLibraryErrorDomain";
constexpr int64_t kCompileFailure = 3, kFunctionNotFound = 5;
constexpr char kArchiveErrors[] = "MTLBinaryArchiveDomain";
constexpr int64_t kInvalidFile = 1, kArchiveMiss = 3, kArchiveInternal = 4;
constexpr char kCommandBufferErrors[] = "MTLCommandBufferErrorDomain";

struct Size {
  uint64_t width, height, depth;
};
struct Range {
  uint64_t location, length;
};

// ---- Device and buffers --------------------------------------------------------------

struct Device : Object {
  static Class& TheClass();
};
Device* TheDevice();
// The methods of MTLDevice that library.cc and commands.cc have.
void DefineLibraryFactories(Class& c);
void DefineQueueFactories(Class& c);

// With a label, as most objects of Metal have.
struct Labelled : Object {
  std::string label;
};
// Adds label, setLabel: and device.
void DefineLabelled(Class& c);

struct Buffer : Labelled {
  static Class& TheClass();
  ~Buffer() override;
  char* memory = nullptr;
  size_t length = 0;
  uint64_t options = 0;
  bool owned = false;
  BlockLiteral* deallocator = nullptr;
};

// ---- Libraries, functions, pipelines -------------------------------------------------

struct CompileOptions : Object {
  static Class& TheClass();
  std::optional<uint64_t> language_version;
  bool fast_math = true;  // Metal's default
};

struct Library : Labelled {
  static Class& TheClass();
  uint64_t source_hash = 0;
  std::map<std::string, std::string> kernels;  // host name: expression
};

struct ConstantValues : Object {
  static Class& TheClass();
  struct Value {
    uint64_t type;
    int64_t value;
  };
  std::map<uint64_t, Value> by_index;
  std::map<std::string, Value> by_name;
};

struct Function : Labelled {
  static Class& TheClass();
  std::string name;
  const KernelFacts* kernel = nullptr;
  std::map<unsigned, int64_t> constants;
  bool complete = false;  // every function constant has a value
  std::string key;        // what an archive knows it by
};

struct BinaryArchiveDescriptor : Object {
  static Class& TheClass();
  Ref<Url> url;
};

struct BinaryArchive : Labelled {
  static Class& TheClass();
  std::set<std::string> keys;
};

struct PipelineDescriptor : Labelled {
  static Class& TheClass();
  Ref<Function> function;
  Ref<Array> archives;
  uint64_t max_threads = 0;
  bool multiple_of_width = false;
};

struct PipelineState : Labelled {
  static Class& TheClass();
  const KernelFacts* kernel = nullptr;
  std::map<unsigned, int64_t> constants;
  const jfm::Pipeline* software = nullptr;
  uint64_t max_threads = 0;
  bool multiple_of_width = false;
};

// ---- Commands ------------------------------------------------------------------------

constexpr size_t kMaxBuffers = 31;

// One entry of an encoder's buffer table.
struct Binding {
  Buffer* buffer = nullptr;  // not null: a buffer
  Ref<Buffer> retained;      // the same, unless references are unretained
  uint64_t offset = 0;
  bool is_bytes = false;
  std::vector<char> bytes;
};

struct Command {
  enum class Kind { kDispatch, kCopy, kFill } kind = Kind::kDispatch;
  // kDispatch
  Ref<PipelineState> pipeline;
  std::map<unsigned, Binding> bindings;
  Size threadgroups = {}, threads = {};
  // kCopy, kFill
  Binding from, to;
  uint64_t size = 0;
  uint8_t value = 0;
};

struct QueueState;  // shared with the queue's thread

struct CommandQueue : Labelled {
  static Class& TheClass();
  ~CommandQueue() override;
  std::shared_ptr<QueueState> state;
};

struct Encoder;

struct CommandBuffer : Labelled {
  static Class& TheClass();
  ~CommandBuffer() override;
  Ref<CommandQueue> queue;
  std::shared_ptr<QueueState> queue_state;
  bool retains = true;
  std::vector<Command> commands;
  Encoder* open_encoder = nullptr;
  std::vector<BlockLiteral*> scheduled_handlers, completed_handlers;

  // What the queue's thread changes.
  std::mutex mutex;
  std::condition_variable changed;
  CommandBufferStatus status = kNotEnqueued;
  Ref<Error> error;
  std::optional<std::pair<int64_t, std::string>> planned_error;  // code, description
  bool planned_error_is_told = true;
  double start = 0, end = 0;
};

// Compute and blit.
struct Encoder : Labelled {
  ~Encoder() override;
  Ref<CommandBuffer> command_buffer;
  bool ended = false;
  bool concurrent = false;
};

struct ComputeEncoder : Encoder {
  static Class& TheClass();
  Ref<PipelineState> pipeline;
  std::map<unsigned, Binding> bindings;
  std::map<unsigned, uint64_t> threadgroup_memory;
  std::set<const Buffer*> unordered;  // bound by concurrent dispatches since the last barrier
};

struct BlitEncoder : Encoder {
  static Class& TheClass();
};

}  // namespace fake
