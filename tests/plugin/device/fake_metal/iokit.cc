// The four functions of IOKit that tell a GPU's number of cores, and NSNumber, which is what
// the answer is. What they give and take is theirs to release, as IOKit's rules have it.
#include <map>
#include <string>

#include "tests/plugin/device/fake_metal/foundation.h"

namespace fake {
namespace {

struct Number : Object {
  static Class& TheClass();
  int64_t value = 0;
};

// What a driver might have instead of a number.
struct Data : Object {
  static Class& TheClass();
};

struct MatchingDictionary : Object {
  static Class& TheClass();
  std::string name;
};

// A GPU in the registry: what an io_service_t stands for.
struct Service : Object {
  static Class& TheClass();
};

// io_service_t -> object. Protected by Bookkeeping.
std::map<unsigned, Service*>& Services() {
  static auto& all = *new std::map<unsigned, Service*>;
  return all;
}

bool IsService(const char* function, unsigned service) {
  {
    Bookkeeping lock;
    if (Services().count(service) != 0) return true;
  }
  Fault(std::string(function) + ": " + std::to_string(service) +
        " is no service, or was released before.");
  return false;
}

void DefineNumber(Class& c) {
  for (const char* name : {"integerValue", "longLongValue", "unsignedIntegerValue"}) {
    c.On(name, +[](Number* self, Selector*) { return self->value; });
  }
  c.On("intValue", +[](Number* self, Selector*) { return static_cast<int>(self->value); });
}

void DefineNothing(Class&) {}

FAKE_CLASS(Number, "NSNumber", &DefineNumber)
FAKE_CLASS(Data, "NSData", &DefineNothing)
FAKE_CLASS(MatchingDictionary, "CFDictionary", &DefineNothing)
FAKE_CLASS(Service, "io_service", &DefineNothing)

const PublicClass number_class(&Number::TheClass);

}  // namespace

extern "C" {

FAKE_EXPORT Object* IOServiceMatching(const char* name) {
  if (name == nullptr) {
    Fault("IOServiceMatching: the name is NULL.");
    return nullptr;
  }
  auto* dictionary = Make<MatchingDictionary>();
  dictionary->name = name;
  return dictionary;
}

// Takes over the caller's reference to the dictionary.
FAKE_EXPORT unsigned IOServiceGetMatchingService(unsigned main_port, Object* matching) {
  if (main_port != 0 || !IsAlive(matching) || matching->isa != &MatchingDictionary::TheClass()) {
    Fault("IOServiceGetMatchingService: port " + std::to_string(main_port) +
          " must be 0, and the dictionary one of IOServiceMatching, but it is " + NameOf(matching) +
          ".");
    return 0;
  }
  const bool is_gpu = static_cast<MatchingDictionary*>(matching)->name == "AGXAccelerator";
  Release(matching, kExternal);
  if (!is_gpu || Fact("has_gpu_service") == 0) return 0;
  auto* service = Make<Service>();
  static unsigned last = 0x1000;
  Bookkeeping lock;
  Services()[++last] = service;
  return last;
}

FAKE_EXPORT Object* IORegistryEntryCreateCFProperty(unsigned service, Object* key,
                                                    const void* allocator, unsigned options) {
  if (!IsService("IORegistryEntryCreateCFProperty", service)) return nullptr;
  if (!IsAlive(key) || key->isa != &String::TheClass() || allocator != nullptr || options != 0) {
    Fault("IORegistryEntryCreateCFProperty: the key must be a string, but is " + NameOf(key) +
          "; allocator and options must be 0.");
    return nullptr;
  }
  const int64_t cores = Fact("gpu_core_count");
  if (static_cast<String*>(key)->text != "gpu-core-count" || cores == 0) return nullptr;
  if (cores < 0) return Make<Data>();
  auto* number = Make<Number>();
  number->value = cores;
  return number;
}

FAKE_EXPORT int IOObjectRelease(unsigned service) {
  if (!IsService("IOObjectRelease", service)) return -1;
  Service* object;
  {
    Bookkeeping lock;
    object = Services()[service];
    Services().erase(service);
  }
  Release(object, kExternal);
  return 0;
}

}  // extern "C"

}  // namespace fake
