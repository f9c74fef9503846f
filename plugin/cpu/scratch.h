// Memory for the time of one call, kept for later calls: fresh pages from the system cost more
// than small problems take. What is kept is bounded.
#pragma once

#include <cstddef>

namespace jfm::cpu {

class Scratch {
 public:
  // Aligned to 64 bytes, uninitialised. null data(): there is no such memory.
  explicit Scratch(size_t size_bytes) noexcept;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* data() const noexcept { return data_; }

 private:
  char* data_;
  size_t size_bytes_;
};

}  // namespace jfm::cpu
