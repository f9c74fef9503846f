// From a program that JAX wants compiled to an executable: asks Python for the plan, has
// the host compile what the plan needs, and remembers which of the host's executables
// stand for plans of ours.
#pragma once

#include <memory>
#include <string>

#include "plugin/pjrt/plugin.h"
#include "plugin/pjrt/program.h"
#include "plugin/status.h"

namespace jfm::pjrt {

// What JAX gets is always an executable of the host. With a plan it is that of the plan's
// shadow, a program of the same signature and attributes, so that the host answers every
// question about parameters, results and layouts; all others come to us by the functions
// below.
Result<PJRT_LoadedExecutable*> CompileProgram(const ClientState& client, const std::string& program,
                                              const std::string& options);

struct LoadedExecutable {
  std::shared_ptr<const Program> program;  // the plan it stands for; null: just the host's
  bool may_overwrite_arguments = false;    // whether the host may reuse or delete them
};
LoadedExecutable FindLoaded(const PJRT_LoadedExecutable* executable);
// The plan that an executable stands for; null: it is just the host's.
std::shared_ptr<const Program> FindProgram(const PJRT_Executable* executable);
// What to show of a program where the host's optimised one cannot be: what was given to
// compile. Null: show the host's.
std::shared_ptr<const std::string> CodeInsteadOfOptimized(const PJRT_Executable* executable);

// The host made `executable` from `loaded`, or `loaded` from one that stands for `program`;
// the host destroys one of them.
void NoteUnloaded(const PJRT_LoadedExecutable* loaded, const PJRT_Executable* executable);
void NoteLoaded(const PJRT_LoadedExecutable* loaded, std::shared_ptr<const Program> program);
void Forget(const PJRT_LoadedExecutable* executable);
void Forget(const PJRT_Executable* executable);

// What PJRT_Executable_Serialize gives for a program with a plan: program and options, to
// be compiled again on load. The host's own serialisation would be that of the shadow.
std::string SerializeProgram(const Program& program);
struct SerializedProgram {
  std::string program;
  std::string options;
};
// `is_ours` false: not written by SerializeProgram.
Result<SerializedProgram> DeserializeProgram(const std::string& bytes, bool* is_ours);

// Before Python ends, which would unwind a thread of ours out of its midst: waits until no
// question is open. Later ones are answered with an error.
void StopAskingPython();

// For tests: Python is asked about every program, whatever is in it.
void PlanEveryProgram(bool yes);

int64_t NumPrograms();
int64_t NumSegments();

}  // namespace jfm::pjrt
