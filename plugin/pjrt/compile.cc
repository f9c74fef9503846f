// The question to Python, and the tables of executables.
#include "plugin/pjrt/compile.h"

#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "plugin/c_boundary.h"
#include "plugin/pjrt/custom_call/handler_registry.h"

namespace jfm::pjrt {
namespace {

std::atomic<bool> plans_every_program{false};
std::atomic<int64_t> num_programs{0};
std::atomic<int64_t> num_segments{0};

struct Entry {
  std::shared_ptr<const Program> program;  // null: the host's own
  bool may_overwrite_arguments = false;
  std::shared_ptr<const std::string> code;  // see CodeInsteadOfOptimized
};

std::shared_mutex executables_mutex;  // guards both maps
auto& loaded_executables = *new std::unordered_map<const PJRT_LoadedExecutable*, Entry>;
auto& executables = *new std::unordered_map<const PJRT_Executable*, Entry>;

// MLIR keeps the names of operations and attributes as text in its bytecode.
bool Contains(const std::string& program, const char* name) {
  return program.find(name) != std::string::npos;
}

bool Donates(const std::string& program) {
  return Contains(program, "tf.aliasing_output") || Contains(program, "jax.buffer_donor");
}

// Python's answer.
struct Reply {
  int kind = -1;
  int code = 0;
  std::string data;
};

// Questions that Python is answering, on whatever threads.
struct Questions {
  std::mutex mutex;  // guards the other members
  std::condition_variable is_answered;
  int num_open = 0;
  bool are_over = false;
};
Questions& questions = *new Questions;

Result<Reply> AskPython(const std::string& program, const std::string& options) {
  Reply reply;
  {
    std::lock_guard<std::mutex> lock(questions.mutex);
    if (questions.are_over) {
      return Status(Code::kCancelled, "the process is ending: nothing can be compiled any more.");
    }
    ++questions.num_open;
  }
  ThePlugin()->settings.partition(program.data(), program.size(), options.data(), options.size(),
                                  &reply);
  {
    std::lock_guard<std::mutex> lock(questions.mutex);
    --questions.num_open;
    questions.is_answered.notify_all();
  }
  // Ctrl-C ended the answer, and must end what the user's code does as well.
  if (reply.kind == JFM_REPLY_ERROR && reply.code == static_cast<int>(Code::kCancelled)) {
    std::raise(SIGINT);
  }
  if (reply.kind == JFM_REPLY_ERROR) {
    const Code code = reply.code == 0 ? Code::kInternal : static_cast<Code>(reply.code);
    return Status(code, std::move(reply.data));
  }
  if (reply.kind < JFM_REPLY_UNCHANGED || reply.kind > JFM_REPLY_ERROR) {
    return Internal("the partitioner of programs gave no answer.");
  }
  return reply;
}

// The host's error says which target it does not know, if that is what is wrong; add which
// ones we do.
Status ExplainTargets(const Status& status, const std::string& program) {
  const std::string registered = RegisteredTargetsText();
  const bool is_about_a_call = Contains(status.message(), "andler") ||
                               Contains(status.message(), "ustom call") ||
                               Contains(status.message(), "ustom_call");
  const bool is_explained = Contains(status.message(), registered.c_str());
  if (!Contains(program, "custom_call") || !is_about_a_call || is_explained) return status;
  return {status.code(),
          status.message() + "\nCustom calls for platform '" +
              ThePlugin()->settings.platform_name +
              "' are those of the host plugin and the targets registered by "
              "jax.ffi.register_ffi_target(..., platform='" +
              ThePlugin()->settings.platform_name + "'): " + registered + "."};
}

Result<PJRT_LoadedExecutable*> CompileOnHost(const ClientState& client, const std::string& program,
                                             const std::string& options) {
  Result<std::unique_ptr<HostExecutable>> executable =
      HostExecutable::Compile(client.device, program, options);
  if (!executable.ok()) return ExplainTargets(executable.status(), program);
  PJRT_LoadedExecutable* handle = (*executable)->Release();
  std::unique_lock<std::shared_mutex> lock(executables_mutex);
  Entry& entry = loaded_executables[handle];
  entry.may_overwrite_arguments = Donates(program);
  if ((ThePlugin()->settings.flags & JFM_HIDE_OPTIMIZED_PROGRAM) != 0) {
    entry.code = std::make_shared<const std::string>(program);
  }
  return handle;
}

Result<PJRT_LoadedExecutable*> LoadPlan(const ClientState& client, const std::string& bytes,
                                        const std::string& options) {
  Result<Plan> plan = DecodePlan(bytes);
  if (!plan.ok()) return plan.status();
  Result<std::unique_ptr<HostExecutable>> shadow =
      HostExecutable::Compile(client.device, plan->shadow, options);
  if (!shadow.ok()) return shadow.status();
  // jaxlib ends the process when a result is not where the executable says.
  if (Status status = (*shadow)->RequireDefaultMemory(); !status.ok()) return status;
  const std::string original = plan->program;
  Result<std::shared_ptr<const Program>> program =
      Program::Load(client.device, client.access, std::move(*plan), options, **shadow);
  if (!program.ok()) return ExplainTargets(program.status(), original);
  num_programs.fetch_add(1, std::memory_order_relaxed);
  num_segments.fetch_add(static_cast<int64_t>((*program)->plan().segments.size()),
                         std::memory_order_relaxed);
  PJRT_LoadedExecutable* handle = (*shadow)->Release();
  std::unique_lock<std::shared_mutex> lock(executables_mutex);
  loaded_executables[handle].program = std::move(*program);
  return handle;
}

// -- The serialised form ----------------------------------------------------------------

constexpr char kMagic[] = "jax_flash_metal program 1\n";
constexpr size_t kMagicSize = sizeof(kMagic) - 1;

void AppendSized(const std::string& part, std::string& text) {
  const uint64_t size = part.size();
  text.append(reinterpret_cast<const char*>(&size), sizeof(size));
  text += part;
}

bool ReadSized(const std::string& text, size_t& position, std::string& part) {
  uint64_t size = 0;
  if (text.size() - position < sizeof(size)) return false;
  std::memcpy(&size, text.data() + position, sizeof(size));
  position += sizeof(size);
  if (text.size() - position < size) return false;
  part = text.substr(position, size);
  position += size;
  return true;
}

}  // namespace

Result<PJRT_LoadedExecutable*> CompileProgram(const ClientState& client, const std::string& program,
                                              const std::string& options) {
  const bool is_plain = !Contains(program, "custom_call");
  if (is_plain && !ThePlugin()->is_old_host() && !plans_every_program) {
    return CompileOnHost(client, program, options);
  }
  Result<Reply> reply = AskPython(program, options);
  if (!reply.ok()) return reply.status();
  if (reply->kind == JFM_REPLY_PLAN) return LoadPlan(client, reply->data, options);
  if (reply->kind == JFM_REPLY_REWRITTEN) return CompileOnHost(client, reply->data, options);
  return CompileOnHost(client, program, options);
}

LoadedExecutable FindLoaded(const PJRT_LoadedExecutable* executable) {
  std::shared_lock<std::shared_mutex> lock(executables_mutex);
  const auto found = loaded_executables.find(executable);
  // One that did not pass through our hands (deserialised by the host) may overwrite.
  if (found == loaded_executables.end()) return {nullptr, true};
  return {found->second.program, found->second.may_overwrite_arguments};
}

std::shared_ptr<const Program> FindProgram(const PJRT_Executable* executable) {
  std::shared_lock<std::shared_mutex> lock(executables_mutex);
  const auto found = executables.find(executable);
  return found == executables.end() ? nullptr : found->second.program;
}

std::shared_ptr<const std::string> CodeInsteadOfOptimized(const PJRT_Executable* executable) {
  std::shared_lock<std::shared_mutex> lock(executables_mutex);
  const auto found = executables.find(executable);
  if (found == executables.end()) return nullptr;
  const Entry& entry = found->second;
  // The plan's own program, kept alive by the plan.
  if (entry.program != nullptr) return {entry.program, &entry.program->plan().program};
  return entry.code;
}

void NoteUnloaded(const PJRT_LoadedExecutable* loaded, const PJRT_Executable* executable) {
  std::unique_lock<std::shared_mutex> lock(executables_mutex);
  const auto found = loaded_executables.find(loaded);
  if (found == loaded_executables.end()) return;
  const Entry& entry = found->second;
  if (entry.program != nullptr || entry.code != nullptr) executables[executable] = entry;
}

void NoteLoaded(const PJRT_LoadedExecutable* loaded, std::shared_ptr<const Program> program) {
  std::unique_lock<std::shared_mutex> lock(executables_mutex);
  loaded_executables[loaded].program = std::move(program);
}

void Forget(const PJRT_LoadedExecutable* executable) {
  Entry entry;  // destroyed after the lock
  std::unique_lock<std::shared_mutex> lock(executables_mutex);
  const auto found = loaded_executables.find(executable);
  if (found == loaded_executables.end()) return;
  entry = std::move(found->second);
  loaded_executables.erase(found);
  lock.unlock();
}

void Forget(const PJRT_Executable* executable) {
  Entry entry;
  std::unique_lock<std::shared_mutex> lock(executables_mutex);
  const auto found = executables.find(executable);
  if (found == executables.end()) return;
  entry = std::move(found->second);
  executables.erase(found);
  lock.unlock();
}

std::string SerializeProgram(const Program& program) {
  std::string text = kMagic;
  AppendSized(program.plan().program, text);
  AppendSized(program.options(), text);
  return text;
}

Result<SerializedProgram> DeserializeProgram(const std::string& bytes, bool* is_ours) {
  *is_ours = bytes.compare(0, kMagicSize, kMagic) == 0;
  SerializedProgram serialized;
  if (!*is_ours) return serialized;
  size_t position = kMagicSize;
  if (!ReadSized(bytes, position, serialized.program) ||
      !ReadSized(bytes, position, serialized.options) || position != bytes.size()) {
    return InvalidArgument("the serialised program is cut short.");
  }
  return serialized;
}

void PlanEveryProgram(bool yes) { plans_every_program = yes; }

void StopAskingPython() {
  if (!CheckNotForked().ok()) return;  // whoever was to answer stayed behind
  std::unique_lock<std::mutex> lock(questions.mutex);
  questions.are_over = true;
  questions.is_answered.wait(lock, [] { return questions.num_open == 0; });
}

int64_t NumPrograms() { return num_programs.load(std::memory_order_relaxed); }
int64_t NumSegments() { return num_segments.load(std::memory_order_relaxed); }

}  // namespace jfm::pjrt

extern "C" JFM_EXPORT void jfm_pjrt_reply(void* sink, int kind, int code, const char* data,
                                          size_t size) {
  auto& reply = *static_cast<jfm::pjrt::Reply*>(sink);
  reply.kind = kind;
  reply.code = code;
  reply.data.assign(data == nullptr ? "" : data, data == nullptr ? 0 : size);
}
