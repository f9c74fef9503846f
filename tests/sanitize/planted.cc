// Driver: one mistake of each kind, to see that the sanitizers see them.
#include <climits>
#include <cstdlib>
#include <cstring>

#include "tests/sanitize/driver.h"

namespace {

void Overflow() {
  volatile char* const memory = static_cast<char*>(std::malloc(16));
  for (int i = 0; i <= 16; ++i) memory[i] = 1;
  std::free(const_cast<char*>(memory));
}

void* volatile kept;
void Leak() {
  kept = std::malloc(1234);
  kept = nullptr;
}

void SignedOverflow() {
  volatile int x = INT_MAX;
  x = x + 1;
}

void Race() {
  int shared = 0;
  jfm::InThreads(2, [&shared](int) {
    for (int i = 0; i < 1000; ++i) ++*const_cast<volatile int*>(&shared);
  });
}

}  // namespace

int main(int argc, char** argv) {
  const char* const mistake = argc > 1 ? argv[1] : "";
  if (std::strcmp(mistake, "heap-buffer-overflow") == 0) Overflow();
  if (std::strcmp(mistake, "LeakSanitizer") == 0) Leak();
  if (std::strcmp(mistake, "signed integer overflow") == 0) SignedOverflow();
  if (std::strcmp(mistake, "data race") == 0) Race();
  return 0;
}
