// The part of Foundation that Metal's interface needs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/plugin/device/fake_metal/runtime.h"

namespace fake {

struct String : Object {
  static Class& TheClass();
  std::string text;
};

struct Error : Object {
  static Class& TheClass();
  std::string domain;
  int64_t code = 0;
  std::string description;
};

struct Url : Object {
  static Class& TheClass();
  std::string path;
};

struct Array : Object {
  static Class& TheClass();
  std::vector<Ref<Object>> items;
};

// Autoreleased.
String* NewText(const std::string& text);
Error* NewError(const std::string& domain, int64_t code, const std::string& description);

// What methods with an NSError** do when they fail.
void SetError(Object** error, const char* domain, int64_t code, const std::string& description);

}  // namespace fake
