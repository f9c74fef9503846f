// Prints the tables of plugin/device/apple, one line each, fields separated by tabs:
// selectors with the Objective-C encodings of their C++ types. A type without an encoding
// here does not compile.
#include <cstdio>

#include "plugin/device/apple/constants.h"
#include "plugin/device/apple/selectors.h"

namespace {

using namespace jfm::apple;

template <class T>
constexpr const char* kEncoding = nullptr;
template <> constexpr const char* kEncoding<void> = "v";
template <> constexpr const char* kEncoding<id> = "@";
template <> constexpr const char* kEncoding<id*> = "^@";
template <> constexpr const char* kEncoding<SEL> = ":";
template <> constexpr const char* kEncoding<Block*> = "@?";
template <> constexpr const char* kEncoding<BOOL> = "B";
template <> constexpr const char* kEncoding<NSInteger> = "q";
template <> constexpr const char* kEncoding<NSUInteger> = "Q";
template <> constexpr const char* kEncoding<unsigned long long> = "Q";
template <> constexpr const char* kEncoding<const char*> = "*";
template <> constexpr const char* kEncoding<void*> = "^v";
template <> constexpr const char* kEncoding<const void*> = "^v";
template <> constexpr const char* kEncoding<MTLSize> = "{MTLSize=QQQ}";
static_assert(sizeof(MTLSize) == 3 * sizeof(NSUInteger));

template <class T>
const char* Encoding() {
  static_assert(kEncoding<T> != nullptr, "add the encoding of this type");
  return kEncoding<T>;
}

template <class R, class... Args>
void PrintSelector(const char* owner, const char* selector, R (*)(Args...)) {
  std::printf("selector\t%s\t%s\t%s", owner, selector, Encoding<R>());
  (std::fputs(Encoding<Args>(), stdout), ...);
  std::puts("");
}

}  // namespace

int main() {
#define JFM_PRINT(name, owner, selector, ...) \
  PrintSelector(#owner, selector, static_cast<JFM_SIGNATURE_POINTER(__VA_ARGS__)>(nullptr));
#define JFM_SIGNATURE_POINTER(result, ...) result (*)(__VA_ARGS__)
  JFM_SELECTORS(JFM_PRINT)
#undef JFM_PRINT
#define JFM_PRINT(name) std::printf("class\t%s\n", #name);
  JFM_CLASSES(JFM_PRINT)
#undef JFM_PRINT
#define JFM_PRINT(name, apple_name, value) \
  std::printf("constant\t%s\t%llu\n", #apple_name, static_cast<unsigned long long>(value));
  JFM_METAL_CONSTANTS(JFM_PRINT)
#undef JFM_PRINT
}
