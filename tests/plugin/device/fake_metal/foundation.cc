// NSString, NSError, NSURL, NSArray, NSProcessInfo, as far as a Metal layer can need them.
#include "tests/plugin/device/fake_metal/foundation.h"

#include <cstdlib>
#include <cstring>

namespace fake {
namespace {

constexpr uint64_t kAsciiEncoding = 1;
constexpr uint64_t kUtf8Encoding = 4;

bool IsUtf8(const std::string& text) {
  for (size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    const size_t more = first < 0x80 ? 0 : first >> 5 == 6 ? 1 : first >> 4 == 14 ? 2 : 3;
    if (first >= 0x80 && (first < 0xC2 || first > 0xF4)) return false;
    for (size_t j = 1; j <= more; ++j) {
      if (i + j >= text.size() || static_cast<unsigned char>(text[i + j]) >> 6 != 2) return false;
    }
    i += 1 + more;
  }
  return true;
}

// A new NSString, one reference for the caller. Null if the bytes are not text.
String* FromBytes(const Object* self, const Selector* selector, const char* bytes, size_t length,
                  uint64_t encoding) {
  if (bytes == nullptr) {
    Fault(MethodName(self, selector) + ": the text is NULL.");
    return nullptr;
  }
  if (encoding != kUtf8Encoding && encoding != kAsciiEncoding) {
    Fault(MethodName(self, selector) + ": encoding " + std::to_string(encoding) +
          " is none of NSUTF8StringEncoding (4) and NSASCIIStringEncoding (1).");
    return nullptr;
  }
  const std::string text(bytes, length);
  if (!IsUtf8(text)) return nullptr;  // as documented: nil, no exception
  auto* string = Make<String>();
  string->text = text;
  return string;
}

template <class T>
T* AutoreleasedOrNil(T* object) {
  return object == nullptr ? nullptr : Autoreleased(object);
}

// Both classes are clusters: alloc gives a placeholder, and init another object. Code that
// keeps what alloc gave is wrong.
struct StringPlaceholder : Object {
  static Class& TheClass();
};
struct ArrayPlaceholder : Object {
  static Class& TheClass();
};

// What [string UTF8String] points into: it lives as long as the pool.
struct Utf8Bytes : Object {
  static Class& TheClass();
  std::unique_ptr<char[]> bytes;
};

const char* LentBytes(const std::string& text) {
  auto* holder = Make<Utf8Bytes>();
  holder->bytes = std::make_unique<char[]>(text.size() + 1);
  std::memcpy(holder->bytes.get(), text.c_str(), text.size() + 1);
  const char* bytes = holder->bytes.get();
  Autorelease(holder);
  return bytes;
}

void DefineString(Class& c) {
  c.allocate = +[]() -> Object* {
    auto* placeholder = Make<StringPlaceholder>();
    placeholder->initialized = false;
    return placeholder;
  };
  c.OnClass("string", +[](Object*, Selector*) { return NewText(""); });
  c.OnClass(
      "stringWithUTF8String:", +[](Object* self, Selector* s, const char* text) {
        return AutoreleasedOrNil(
            FromBytes(self, s, text, text == nullptr ? 0 : std::strlen(text), kUtf8Encoding));
      });
  c.OnClass(
      "stringWithCString:encoding:",
      +[](Object* self, Selector* s, const char* text, uint64_t encoding) {
        return AutoreleasedOrNil(
            FromBytes(self, s, text, text == nullptr ? 0 : std::strlen(text), encoding));
      });
  c.On("UTF8String", +[](String* self, Selector*) { return LentBytes(self->text); });
  c.On(
      "length", +[](String* self, Selector*) -> uint64_t {
        uint64_t units = 0;  // UTF-16: two for what takes four bytes in UTF-8
        for (const char c : self->text) {
          const auto byte = static_cast<unsigned char>(c);
          units += byte >> 6 == 2 ? 0 : byte >= 0xF0 ? 2 : 1;
        }
        return units;
      });
}

// Runs one of the functions above for an init method: the placeholder is used up.
template <class T>
T* Initialised(Object* placeholder, T* object) {
  Release(placeholder, kExternal);
  return object;
}

void DefineStringPlaceholder(Class& c) {
  c.On("init", +[](Object* self, Selector*) { return Initialised(self, Make<String>()); });
  c.On(
      "initWithUTF8String:", +[](Object* self, Selector* s, const char* text) {
        return Initialised(
            self, FromBytes(self, s, text, text == nullptr ? 0 : std::strlen(text), kUtf8Encoding));
      });
  c.On(
      "initWithCString:encoding:",
      +[](Object* self, Selector* s, const char* text, uint64_t encoding) {
        return Initialised(
            self, FromBytes(self, s, text, text == nullptr ? 0 : std::strlen(text), encoding));
      });
  c.On(
      "initWithBytes:length:encoding:",
      +[](Object* self, Selector* s, const char* text, uint64_t length, uint64_t encoding) {
        return Initialised(self, FromBytes(self, s, text, length, encoding));
      });
  c.On(
      "initWithBytesNoCopy:length:encoding:freeWhenDone:",
      +[](Object* self, Selector* s, char* text, uint64_t length, uint64_t encoding,
          bool free_when_done) {
        String* string = FromBytes(self, s, text, length, encoding);
        if (free_when_done) std::free(text);
        return Initialised(self, string);
      });
}

void DefineError(Class& c) {
  c.On("localizedDescription", +[](Error* self, Selector*) { return NewText(self->description); });
  c.On("domain", +[](Error* self, Selector*) { return NewText(self->domain); });
  c.On("code", +[](Error* self, Selector*) { return self->code; });
}

bool SetPath(Url* url, Selector* selector, Object* path) {
  const auto* text = Argument<String>(url, selector, "the path", path);
  if (text == nullptr) return false;
  if (text->text.empty()) {
    Fault(MethodName(url, selector) + ": the path is empty.");
    return false;
  }
  url->path = text->text;
  return true;
}

void DefineUrl(Class& c) {
  c.Allocates<Url>();
  c.OnClass(
      "fileURLWithPath:", +[](Object*, Selector* s, Object* path) -> Url* {
        auto* url = Make<Url>();
        const bool ok = SetPath(url, s, path);
        Autorelease(url);
        return ok ? url : nullptr;
      });
  c.On(
      "initFileURLWithPath:", +[](Url* self, Selector* s, Object* path) -> Url* {
        self->initialized = true;
        if (SetPath(self, s, path)) return self;
        Release(self, kExternal);
        return nullptr;
      });
  c.On("path", +[](Url* self, Selector*) { return NewText(self->path); });
}

// A new NSArray, one reference for the caller.
Array* FromObjects(const Object* self, const Selector* selector, Object* const* objects,
                   uint64_t count) {
  if (objects == nullptr && count != 0) {
    Fault(MethodName(self, selector) + ": the objects are NULL.");
    return nullptr;
  }
  auto* array = Make<Array>();
  for (uint64_t i = 0; i < count; ++i) {
    if (IsAlive(objects[i])) {
      array->items.emplace_back(objects[i]);
      continue;
    }
    Fault(MethodName(self, selector) + ": object " + std::to_string(i) + " is " +
          NameOf(objects[i]) + ".");
    Release(array, kExternal);
    return nullptr;
  }
  return array;
}

void DefineArray(Class& c) {
  c.allocate = +[]() -> Object* {
    auto* placeholder = Make<ArrayPlaceholder>();
    placeholder->initialized = false;
    return placeholder;
  };
  c.OnClass("array", +[](Object*, Selector*) { return Autoreleased(Make<Array>()); });
  c.OnClass(
      "arrayWithObject:", +[](Object* self, Selector* s, Object* object) {
        return AutoreleasedOrNil(FromObjects(self, s, &object, 1));
      });
  c.OnClass(
      "arrayWithObjects:count:",
      +[](Object* self, Selector* s, Object* const* objects, uint64_t count) {
        return AutoreleasedOrNil(FromObjects(self, s, objects, count));
      });
  c.On("count", +[](Array* self, Selector*) -> uint64_t { return self->items.size(); });
  c.On(
      "objectAtIndex:", +[](Array* self, Selector* s, uint64_t index) -> Object* {
        if (index < self->items.size()) return Lent(self->items[index].get());
        Fault(MethodName(self, s) + ": index " + std::to_string(index) + " of an array of " +
              std::to_string(self->items.size()) + ".");
        return nullptr;
      });
}

void DefineArrayPlaceholder(Class& c) {
  c.On("init", +[](Object* self, Selector*) { return Initialised(self, Make<Array>()); });
  c.On(
      "initWithObjects:count:",
      +[](Object* self, Selector* s, Object* const* objects, uint64_t count) {
        return Initialised(self, FromObjects(self, s, objects, count));
      });
}

struct ProcessInfo : Object {
  static Class& TheClass();
};

void DefineProcessInfo(Class& c) {
  c.OnClass("processInfo", +[](Object*, Selector*) { return Autoreleased(Make<ProcessInfo>()); });
  c.On(
      "operatingSystemVersionString",
      +[](Object*, Selector*) { return NewText(FactText("operatingSystemVersionString")); });
}

void DefineNothing(Class&) {}

const PublicClass classes[] = {PublicClass(&String::TheClass), PublicClass(&Error::TheClass),
                               PublicClass(&Url::TheClass), PublicClass(&Array::TheClass),
                               PublicClass(&ProcessInfo::TheClass)};

FAKE_CLASS(StringPlaceholder, "NSPlaceholderString", &DefineStringPlaceholder)
FAKE_CLASS(ArrayPlaceholder, "__NSPlaceholderArray", &DefineArrayPlaceholder)
FAKE_CLASS(Utf8Bytes, "UTF8String", &DefineNothing)
FAKE_CLASS(ProcessInfo, "NSProcessInfo", &DefineProcessInfo)

}  // namespace

FAKE_CLASS(String, "NSString", &DefineString)
FAKE_CLASS(Error, "NSError", &DefineError)
FAKE_CLASS(Url, "NSURL", &DefineUrl)
FAKE_CLASS(Array, "NSArray", &DefineArray)

String* NewText(const std::string& text) {
  auto* string = Make<String>();
  string->text = text;
  return Autoreleased(string);
}

Error* NewError(const std::string& domain, int64_t code, const std::string& description) {
  auto* error = Make<Error>();
  error->domain = domain;
  error->code = code;
  error->description = description;
  return Autoreleased(error);
}

void SetError(Object** error, const char* domain, int64_t code, const std::string& description) {
  if (error != nullptr) *error = NewError(domain, code, description);
}

}  // namespace fake
