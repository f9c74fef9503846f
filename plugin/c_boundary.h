// What every function needs that C code or another runtime calls: visibility, and a
// guard that turns exceptions into a Status. Nothing else knows of exceptions.
#pragma once

#include <exception>
#include <new>
#include <utility>

#include "plugin/status.h"

#define JFM_EXPORT __attribute__((visibility("default")))

namespace jfm {

// Calls `function`, which returns a Status; an exception becomes a Status too.
template <class Function>
Status WithoutExceptions(Function&& function) noexcept {
  try {
    try {
      return std::forward<Function>(function)();
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& error) {
      return Internal(std::string("unexpected exception: ") + error.what());
    } catch (...) {
      return Internal("unexpected exception of an unknown type");
    }
  } catch (const std::bad_alloc&) {
    // Short enough for std::string to hold without allocating.
    return {Code::kResourceExhausted, "out of host memory"};
  }
}

}  // namespace jfm
