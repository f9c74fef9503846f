// Helpers on threads of our own, for callers without a thread pool: started for the call,
// joined at its end.
#pragma once

#include <thread>
#include <vector>

#include "plugin/cpu/workers.h"

namespace jfm {

class ThreadHelpers : public cpu::HelperSource {
 public:
  ~ThreadHelpers() override {
    for (std::thread& thread : threads_) thread.join();
  }

  bool Schedule(void (*task)(void*), void* data) override {
    try {
      threads_.reserve(threads_.size() + 1);
      threads_.emplace_back(task, data);
      return true;
    } catch (...) {  // no memory, or too many threads: the caller works alone
      return false;
    }
  }

 private:
  std::vector<std::thread> threads_;
};

}  // namespace jfm
