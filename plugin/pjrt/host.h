// The host plugin: loads its library and calls the functions of its API table, with
// arguments of the size that it expects and errors turned into Status. Knows nothing of
// plans or custom calls.
#pragma once

#include <cstring>
#include <memory>
#include <string>

#include "plugin/pjrt/pjrt_api.h"
#include "plugin/status.h"

namespace jfm::pjrt {

class Host {
 public:
  // Errors name the file and say what is wrong with it.
  static Result<std::unique_ptr<const Host>> Load(const std::string& path);

  // Slots that the host has and that we know where to find.
  bool Has(Slot slot) const { return functions_[static_cast<size_t>(slot)] != nullptr; }
  size_t num_slots() const { return num_slots_; }
  int minor() const { return minor_; }
  const PJRT_Extension* extensions() const { return api_->extensions; }

  // Arguments of ours: fills in struct_size.
  template <class Args>
  Status Call(Args& args) const {
    args.struct_size = sizeof(Args);
    return TakeError(Forward(Args::kSlot, &args));
  }

  // Arguments of our caller, whose struct may be shorter than the host's: the host then
  // sees zeros behind it. The error is the host's.
  PJRT_Error* Forward(Slot slot, void* args) const;

  // Reads and destroys an error of the host (or of ours); OK for null.
  Status TakeError(PJRT_Error* error) const;

 private:
  Host() = default;

  const PJRT_Api* api_ = nullptr;
  int minor_ = 0;
  size_t num_slots_ = 0;
  PJRT_Function functions_[kNumSlots] = {};
};

// What a function of the host reported as a success cannot be true: "gave no buffer".
Status WrongAnswer(Slot slot, const std::string& what);

// Larger than every struct of arguments or options of every version so far.
constexpr size_t kPaddedSize = 256;

// A copy of a struct that starts with its size, with zeros behind it up to kPaddedSize.
struct PaddedStruct {
  explicit PaddedStruct(const void* source) {
    std::memcpy(&size, source, sizeof(size));
    std::memcpy(bytes, source, size);
    std::memset(bytes + size, 0, kPaddedSize - size);
    const size_t padded = kPaddedSize;
    std::memcpy(bytes, &padded, sizeof(padded));
  }
  static bool Fits(const void* source) {
    size_t size;
    std::memcpy(&size, source, sizeof(size));
    return size <= kPaddedSize;
  }
  void CopyBack(void* target) {
    std::memcpy(bytes, &size, sizeof(size));
    std::memcpy(target, bytes, size);
  }

  size_t size;
  alignas(16) char bytes[kPaddedSize];
};

}  // namespace jfm::pjrt
