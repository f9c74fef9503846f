// Functions that do nothing and do not fail.
#include "plugin/pjrt/profiler.h"

#include <cstdint>

namespace jfm::pjrt {
namespace {

struct CreateArgs {
  size_t struct_size;
  const char* options;
  size_t options_size;
  void* profiler;
};
struct CollectArgs {
  size_t struct_size;
  void* profiler;
  uint8_t* buffer;
  size_t buffer_size;
};

// Each function takes a struct and returns an error. Callers do not clear their structs.
void* Create(void* args) {
  static_cast<CreateArgs*>(args)->profiler = nullptr;
  return nullptr;
}
void* Collect(void* args) {
  static_cast<CollectArgs*>(args)->buffer = nullptr;
  static_cast<CollectArgs*>(args)->buffer_size = 0;
  return nullptr;
}
void* Succeed(void*) { return nullptr; }

struct ProfilerFunctions {
  size_t struct_size;
  void* unused;
  void* (*about_errors[3])(void*);  // of which there are none
  void* (*create)(void*);
  void* (*destroy)(void*);
  void* (*start)(void*);
  void* (*stop)(void*);
  void* (*collect)(void*);
};
constexpr ProfilerFunctions kFunctions = {
    sizeof(ProfilerFunctions), nullptr, {Succeed, Succeed, Succeed}, Create, Succeed, Succeed,
    Succeed,                   Collect};

struct ProfilerExtension : PJRT_Extension {
  const ProfilerFunctions* functions;
  int64_t trace_context;  // since 0.55
};

}  // namespace

PJRT_Extension* WithProfiler(PJRT_Extension* next) {
  for (const PJRT_Extension* node = next; node != nullptr; node = node->next) {
    if (node->type == PJRT_ExtensionType_Profiler) return next;
  }
  static ProfilerExtension extension = {};
  extension.struct_size = sizeof(extension);
  extension.type = PJRT_ExtensionType_Profiler;
  extension.next = next;
  extension.functions = &kFunctions;
  return &extension;
}

}  // namespace jfm::pjrt
