// Handlers against the bare C ABI, with the layouts of versions whose headers are not
// installed: what a library compiled long ago, or in the future, asks of its runtime.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

namespace {

struct Extension {
  size_t size;
  int32_t type;
  Extension* next;
};

struct Metadata {
  size_t size;
  size_t version_size;
  void* version_extensions;
  int32_t major;
  int32_t minor;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

using Function = void* (*)(void*);

struct Api {
  size_t size;
  void* extensions;
  size_t version_size;
  void* version_extensions;
  int32_t major;
  int32_t minor;
  void* internal;
  Function slots[20];
};

struct Values {
  size_t size;
  void* extensions;
  int64_t count;
  int32_t* types;
  void** values;
};

struct Buffer {
  size_t size;
  void* extensions;
  int32_t dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct Frame {
  size_t size;
  Extension* extensions;
  const Api* api;
  void* context;
  int32_t stage;
  Values operands;
  Values results;
  size_t attributes[6];
  void* future;
};

// Any function's arguments: as many words as its version counts.
struct Args {
  size_t words[8];
};

void* Fail(const Frame& frame, const std::string& message) {
  Args args = {{28, 0, reinterpret_cast<size_t>(message.c_str()), 13}};
  return frame.api->slots[0](&args);
}

void* Tell(const Frame& frame, int32_t major, int32_t minor) {
  Metadata& metadata = *reinterpret_cast<MetadataExtension*>(frame.extensions)->metadata;
  metadata.major = major;
  metadata.minor = minor;
  return nullptr;
}

int64_t num_deleted = 0;
void Delete(void* object) {
  ++num_deleted;
  std::free(object);
}

int64_t type_id = 0;

// Where a version has what. Slots as in its table, sizes as its headers count.
struct Layout {
  int32_t minor;
  int future_create;
  int num_threads;      // -1: it has none
  int run_id;           // -1
  bool set_deleter;     // State_Set takes a deleter
  bool has_stage;       // State_Set and State_Get take a stage
  size_t message_size;  // of Error_GetMessage's arguments
};

// Also checks that the runtime answers as XLA of that version.
void* Run(const Layout& layout, Frame& frame) {
  if (frame.size != 168) return Fail(frame, "size of the frame");
  if (frame.extensions != nullptr) return Tell(frame, 0, layout.minor);
  const Api& api = *frame.api;
  if (api.minor != layout.minor) return Fail(frame, "version of the table");
  const size_t context = reinterpret_cast<size_t>(frame.context);
  if (frame.stage == 0) {
    if (frame.operands.count != 0 || frame.results.count != 0) return Fail(frame, "operands");
    const std::string name =
        "raw" + std::to_string(layout.minor) + "_" + std::to_string(layout.future_create);
    type_id = 0;
    const size_t info[3] = {24, 0, reinterpret_cast<size_t>(&Delete)};
    Args type = {{40, 0, reinterpret_cast<size_t>(name.data()), name.size(),
                  reinterpret_cast<size_t>(&type_id),
                  layout.set_deleter ? 0x1234 : reinterpret_cast<size_t>(info)}};
    if (void* error = api.slots[5](&type)) return error;
    const size_t state = reinterpret_cast<size_t>(std::malloc(8));
    const size_t id = reinterpret_cast<size_t>(&type_id);
    Args set = {{48, 0, context, 0, id, state}};
    if (layout.set_deleter) {
      set = {{48, 0, context, id, state, reinterpret_cast<size_t>(&Delete)}};
    } else if (!layout.has_stage) {
      set = {{40, 0, context, id, state}};
    }
    return api.slots[7](&set);
  }
  if (frame.stage != 3) return Fail(frame, "stage");
  auto* out = static_cast<int64_t*>(static_cast<Buffer*>(frame.results.values[0])->data);

  const size_t id = reinterpret_cast<size_t>(&type_id);
  Args get = {{40, 0, context, id, 0}};
  if (layout.has_stage) get = {{48, 0, context, 0, id, 0}};
  if (void* error = api.slots[8](&get)) return error;
  out[0] = get.words[layout.has_stage ? 5 : 4] != 0;

  // An error of the runtime: no user data of that type.
  Args user = {{40, 0, context, id, 0}};
  void* error = api.slots[6](&user);
  if (error == nullptr) return Fail(frame, "no error");
  Args message = {{layout.message_size, 0, reinterpret_cast<size_t>(error), 0, 77}};
  api.slots[1](&message);
  out[1] = static_cast<int32_t>(message.words[4]);  // the code; 77 if there is none
  const bool has_text = message.words[3] != 0;
  Args destroy = {{24, 0, reinterpret_cast<size_t>(error)}};
  api.slots[2](&destroy);
  if (!has_text) return Fail(frame, "no text");

  if (layout.num_threads >= 0) {
    int64_t count = 0;
    Args threads = {{32, 0, context, reinterpret_cast<size_t>(&count)}};
    if (void* failed = api.slots[layout.num_threads](&threads)) return failed;
    if (count < 1) return Fail(frame, "number of threads");
  }
  if (layout.run_id >= 0) {
    Args run = {{32, 0, context, 0}};
    if (void* failed = api.slots[layout.run_id](&run)) return failed;
    out[2] = static_cast<int64_t>(run.words[3]);
  }
  // A future that failed, and was set once already.
  Args create = {{16, 0, 0}};
  if (void* failed = api.slots[layout.future_create](&create)) return failed;
  frame.future = reinterpret_cast<void*>(create.words[2]);
  const std::string text = "the future's error";
  Args make = {{28, 0, reinterpret_cast<size_t>(text.c_str()), 14}};
  void* future_error = api.slots[0](&make);
  Args set = {{32, 0, create.words[2], reinterpret_cast<size_t>(future_error)}};
  if (void* failed = api.slots[layout.future_create + 2](&set)) return failed;
  Args again = {{24, 0, create.words[2]}};
  void* twice = api.slots[layout.future_create + 1](&again);
  if (twice == nullptr) return Fail(frame, "set twice");
  destroy = {{24, 0, reinterpret_cast<size_t>(twice)}};
  api.slots[2](&destroy);
  return nullptr;
}

}  // namespace

#define LAYOUT(name, ...)                       \
  extern "C" void* name(Frame* frame) {         \
    static const Layout layout = {__VA_ARGS__}; \
    return Run(layout, *frame);                 \
  }
LAYOUT(Raw01First, 1, 12, -1, -1, true, false, 32)  // jaxlib 0.4.34
LAYOUT(Raw01Later, 1, 13, 12, 16, true, false, 32)  // 0.5.3 to 0.7.2
LAYOUT(Raw02, 2, 13, 12, 16, false, false, 32)      // 0.8.2
LAYOUT(Raw03, 3, 13, 12, 16, false, true, 32)       // 0.10.2
LAYOUT(Raw05, 5, 13, 12, 16, false, true, 36)       // 0.12.0

extern "C" int64_t NumDeleted() { return num_deleted; }

extern "C" void* RawFuture(Frame* frame) { return Tell(*frame, 0, 6); }
extern "C" void* RawMajor(Frame* frame) { return Tell(*frame, 1, 0); }
extern "C" void* RawSilent(Frame*) { return nullptr; }
extern "C" void* RawRefuses(Frame* frame) { return Fail(*frame, "not today"); }
