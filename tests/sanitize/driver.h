// What the sanitizers' drivers share: checks that end the process, and threads.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "plugin/status.h"

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

namespace jfm {

inline void CheckOk(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "unexpected error: %s\n", status.message().c_str());
  std::exit(1);
}

inline void CheckError(const Status& status, Code code, const std::string& part_of_message) {
  if (status.code() == code && status.message().find(part_of_message) != std::string::npos) return;
  std::fprintf(stderr, "expected an error with \"%s\", got code %d: %s\n", part_of_message.c_str(),
               static_cast<int>(status.code()), status.message().c_str());
  std::exit(1);
}

// Runs work(0), work(1), … at the same time, and waits.
inline void InThreads(int count, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace jfm
