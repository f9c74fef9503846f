// Finds the runtime's functions, and the small helpers around messages.
#include "plugin/device/apple/objc.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "plugin/device/apple/constants.h"
#include "plugin/device/apple/selectors.h"

namespace jfm::apple {

Runtime runtime;

namespace classes {
#define JFM_DEFINE(name) Class name;
JFM_CLASSES(JFM_DEFINE)
#undef JFM_DEFINE
}  // namespace classes

namespace send {
#define JFM_DEFINE(name, owner, selector, ...) Message<JFM_SIGNATURE(__VA_ARGS__)> name{selector};
JFM_SELECTORS(JFM_DEFINE)
#undef JFM_DEFINE
}  // namespace send

namespace {

// What to load, in order.
Result<std::vector<std::string>> Libraries() {
#ifdef __APPLE__
  return std::vector<std::string>{
      "/usr/lib/libSystem.B.dylib",  // blocks
      "/usr/lib/libobjc.A.dylib",
      "/System/Library/Frameworks/Foundation.framework/Foundation",
      // Programs without it get no device from MTLCreateSystemDefaultDevice, says Apple.
      "/System/Library/Frameworks/CoreGraphics.framework/CoreGraphics",
      "/System/Library/Frameworks/IOKit.framework/IOKit",
      "/System/Library/Frameworks/Metal.framework/Metal",
  };
#else
  const char* library = std::getenv("JFM_FAKE_METAL_LIBRARY");
  if (library == nullptr) {
    return Status(Code::kFailedPrecondition,
                  "there is no Metal on this system, and JFM_FAKE_METAL_LIBRARY names no library "
                  "to take its place in tests.");
  }
  return std::vector<std::string>{library};
#endif
}

class Opener {
 public:
  Status Open() {
    Result<std::vector<std::string>> names = Libraries();
    if (!names.ok()) return names.status();
    for (const std::string& name : *names) {
      // An empty name is the program itself.
      void* library = dlopen(name.empty() ? nullptr : name.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (library != nullptr) {
        libraries_.push_back(library);
      } else {
        reasons_.push_back(dlerror());  // told if a function is missing then
      }
    }
    Find("objc_getClass", runtime.get_class);
    Find("sel_registerName", runtime.register_selector);
    Find("objc_msgSend", runtime.msg_send);
    Find("objc_autoreleasePoolPush", runtime.push_pool);
    Find("objc_autoreleasePoolPop", runtime.pop_pool);
    Find("MTLCreateSystemDefaultDevice", runtime.create_system_default_device);
    Find("_NSConcreteStackBlock", runtime.stack_block_class);
    if (!missing_.empty()) {
      reasons_.push_back("the libraries lack " + Join(missing_) + ".");
      return Status(Code::kNotFound, "Metal cannot be loaded: " + Join(reasons_));
    }
    Find("IOServiceMatching", runtime.io_service_matching);
    Find("IOServiceGetMatchingService", runtime.io_get_matching_service);
    Find("IORegistryEntryCreateCFProperty", runtime.io_create_property);
    Find("IOObjectRelease", runtime.io_object_release);
    runtime.has_iokit = missing_.empty();
    missing_.clear();
#define JFM_FIND(name)                      \
  classes::name = runtime.get_class(#name); \
  if (classes::name == nullptr) missing_.push_back(#name);
    JFM_CLASSES(JFM_FIND)
#undef JFM_FIND
    if (!missing_.empty()) {
      return Status(Code::kNotFound,
                    "Metal lacks the classes " + Join(missing_) + ": macOS 14 or newer is needed.");
    }
#define JFM_REGISTER(name, ...) send::name.Register();
    JFM_SELECTORS(JFM_REGISTER)
#undef JFM_REGISTER
    return {};
  }

 private:
  template <class T>
  void Find(const char* name, T& place) {
    for (void* library : libraries_) {
      if (void* found = dlsym(library, name)) {
        place = reinterpret_cast<T>(found);
        return;
      }
    }
    missing_.push_back(name);
  }

  std::vector<void*> libraries_;  // never closed
  std::vector<std::string> missing_, reasons_;
};

}  // namespace

const Status& OpenRuntime() {
  static const Status& status = *new Status(Opener().Open());
  return status;
}

Block MakeBlock(void (*invoke)(), void* captured) {
  static constexpr BlockDescriptor kDescriptor = {0, sizeof(Block)};
  return {runtime.stack_block_class, 0, 0, invoke, &kDescriptor, captured};
}

Ref Ref::Retain(id object) { return Ref(object == nullptr ? nullptr : send::retain(object)); }

Ref::~Ref() {
  if (object_ != nullptr) send::release(object_);
}

Ref New(Class cls) { return Ref::Adopt(send::init(send::alloc(cls))); }

id String(const std::string& text) {
  return send::stringWithCString(classes::NSString, text.c_str(), constants::kUtf8);
}

std::string Text(id string) {
  const char* text = string == nullptr ? nullptr : send::UTF8String(string);
  return text == nullptr ? "" : text;
}

std::string ErrorText(id error) {
  const std::string text = error == nullptr ? "" : Text(send::localizedDescription(error));
  return text.empty() ? "Metal gives no reason" : text;
}

}  // namespace jfm::apple
