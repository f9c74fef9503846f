// Encoding, committing, waiting, and what is said when the GPU fails.
#include "plugin/device/apple/command_buffer.h"

#include <algorithm>
#include <cstdint>

#include "plugin/device/apple/constants.h"
#include "plugin/device/apple/selectors.h"

namespace jfm::apple {
namespace {

// Metal's own limits for compute functions.
constexpr uint32_t kMaxBindings = 31;
constexpr size_t kMaxConstantBytes = 4096;

MTLSize ToMetal(const Size3& size) { return {size.x, size.y, size.z}; }

uint64_t Count(const Size3& size) { return uint64_t{size.x} * size.y * size.z; }

}  // namespace

Block Completion::NewHandler() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++running_;
  return MakeBlock(reinterpret_cast<void (*)()>(OnCompleted),
                   new std::shared_ptr<Completion>(shared_from_this()));
}

// void (^)(id<MTLCommandBuffer>)
void Completion::OnCompleted(Block* block, id /*commands*/) noexcept {
  // Destroyed after the lock.
  const std::unique_ptr<std::shared_ptr<Completion>> owner(
      static_cast<std::shared_ptr<Completion>*>(block->captured));
  Completion& self = **owner;
  std::lock_guard<std::mutex> lock(self.mutex_);
  --self.running_;
  self.changed_.notify_all();
}

void Completion::WaitForAll() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return running_ == 0; });
}

AppleCommandBuffer::~AppleCommandBuffer() {
  completion_->WaitForAll();
  Pool pool;
  if (encoder_) send::endEncoding(encoder_.get());
  encoder_ = Ref();
  parts_.clear();
}

Status AppleCommandBuffer::Check(const Dispatch& dispatch) const {
  const auto* pipeline = static_cast<const ApplePipeline*>(dispatch.pipeline);
  const auto wrong = [&](const std::string& what) {
    return InvalidArgument(pipeline->kernel + ": " + what);
  };
  const uint64_t num_threads = Count(dispatch.threads_per_threadgroup);
  if (num_threads < 1 || num_threads > pipeline->max_threads) {
    return wrong("a threadgroup must have 1 to " + std::to_string(pipeline->max_threads) +
                 " threads on " + facts_.name + ", but got " + std::to_string(num_threads) + ".");
  }
  for (const BufferBinding& b : dispatch.buffers) {
    const std::string name = "buffer " + std::to_string(b.index);
    if (b.index >= kMaxBindings) return wrong(name + " is beyond the last index, 30.");
    if (b.buffer == nullptr) return wrong(name + " is missing.");
    if (b.offset_bytes > 0 && b.offset_bytes >= b.buffer->size_bytes()) {
      return wrong(name + " has an offset of " + std::to_string(b.offset_bytes) +
                   " bytes, but only " + std::to_string(b.buffer->size_bytes()) + " bytes.");
    }
  }
  for (const BytesBinding& b : dispatch.bytes) {
    const std::string name = "the constants at index " + std::to_string(b.index);
    if (b.index >= kMaxBindings) return wrong(name + " are beyond the last index, 30.");
    if (b.size_bytes < 1 || b.size_bytes > kMaxConstantBytes) {
      return wrong(name + " must have 1 to " + std::to_string(kMaxConstantBytes) +
                   " bytes, but got " + std::to_string(b.size_bytes) + ".");
    }
  }
  return {};
}

Status AppleCommandBuffer::Begin() {
  Ref commands = Ref::Retain(send::commandBuffer(queue_));
  Ref encoder;
  // Its dispatches run one after the other: that is the default.
  if (commands) encoder = Ref::Retain(send::computeCommandEncoder(commands.get()));
  if (!encoder) {
    return Status(Code::kResourceExhausted, facts_.name + " gives no command buffer to encode.");
  }
  encoder_ = std::move(encoder);
  parts_.push_back({std::move(commands), {}});
  work_ = 0;
  return {};
}

Status AppleCommandBuffer::Encode(const Dispatch& dispatch) {
  Pool pool;
  if (Status status = Check(dispatch); !status.ok()) return status;
  if (Count(dispatch.threadgroups) == 0) return {};
  if (encoder_ && work_ > 0 && work_ + dispatch.work > kMaxWorkAtOnce) {
    // The queue runs its command buffers in order, and Metal makes a later one wait for what
    // an earlier one writes to the same buffers.
    if (Status status = Commit(); !status.ok()) return status;
  }
  if (!encoder_) {
    if (Status status = Begin(); !status.ok()) return status;
  }
  work_ += dispatch.work;
  const auto* pipeline = static_cast<const ApplePipeline*>(dispatch.pipeline);
  std::vector<std::string>& kernels = parts_.back().kernels;
  if (std::find(kernels.begin(), kernels.end(), pipeline->kernel) == kernels.end()) {
    kernels.push_back(pipeline->kernel);
  }
  const id encoder = encoder_.get();
  send::setComputePipelineState(encoder, pipeline->state.get());
  for (const BufferBinding& b : dispatch.buffers) {
    const auto* buffer = static_cast<const AppleBuffer*>(b.buffer);
    send::setBuffer(encoder, buffer->object(), buffer->offset() + b.offset_bytes, b.index);
    buffers_.insert(buffer);
  }
  for (const BytesBinding& b : dispatch.bytes) {
    send::setBytes(encoder, b.data, b.size_bytes, b.index);
  }
  send::dispatchThreadgroups(encoder, ToMetal(dispatch.threadgroups),
                             ToMetal(dispatch.threads_per_threadgroup));
  return {};
}

Status AppleCommandBuffer::Commit() {
  if (!encoder_) return {};
  Pool pool;
  send::endEncoding(encoder_.get());
  encoder_ = Ref();
  Block handler = completion_->NewHandler();
  const id commands = parts_.back().commands.get();
  send::addCompletedHandler(commands, &handler);
  send::commit(commands);
  return {};
}

Status AppleCommandBuffer::Outcome(const Part& part) const {
  const id commands = part.commands.get();
  if (send::status(commands) == constants::kCompleted) return {};
  const id error = send::error(commands);
  const NSUInteger code = error == nullptr ? 0 : static_cast<NSUInteger>(send::code(error));
  const std::string reason = ErrorText(error);
  const std::string text = facts_.name + " failed in " + Join(part.kernels) + ": " + reason +
                           " (MTLCommandBufferError " + std::to_string(code) + ").";
  // For some causes Metal has no code, and only the text has the driver's name for them. What
  // stands before that name may be translated.
  const auto says = [&](const char* words) { return reason.find(words) != std::string::npos; };
  if (code == constants::kErrorTimeout || says("ImpactingInteractivity") ||
      says("Impacting Interactivity")) {
    return {Code::kDeadlineExceeded,
            text +
                " macOS ends GPU work that takes seconds or keeps the screen waiting: a smaller "
                "batch may help, and so may AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1 in the environment, "
                "if it is set before the program starts."};
  }
  if (says("InnocentVictim") || says("victim of GPU error")) {
    return {Code::kUnavailable,
            text +
                " This work did nothing wrong: macOS restarted the GPU because of other work, of "
                "this or another process. Try again."};
  }
  if (code == constants::kErrorAccessRevoked || says("SubmissionsIgnored")) {
    return {Code::kUnavailable,
            text +
                " This work did nothing wrong: macOS does not take any more of a process after "
                "many GPU errors. See the first error, and try again in a new process."};
  }
  if (code == constants::kErrorOutOfMemory) {
    return {Code::kResourceExhausted, text + " All buffers together should stay below " +
                                          std::to_string(facts_.memory_limit_bytes) + " bytes."};
  }
  return Internal(text);
}

Status AppleCommandBuffer::Wait() {
  Pool pool;
  if (encoder_) return Internal("a command buffer must be committed before it is waited for.");
  completion_->WaitForAll();
  Status status;
  for (const Part& part : parts_) {
    status = Outcome(part);
    if (!status.ok()) break;
  }
  if (status.ok()) {
    for (const AppleBuffer* buffer : buffers_) buffer->Finish();
  }
  parts_.clear();
  buffers_.clear();
  return status;
}

}  // namespace jfm::apple
