// MTLCommandQueue, MTLCommandBuffer and the encoders. Each queue has a thread that runs its
// command buffers in order, on the software device, and then calls their handlers.
#include <time.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <thread>

#include "plugin/device/software/software_device.h"
#include "tests/plugin/device/fake_metal/fake_metal.h"
#include "tests/plugin/device/fake_metal/metal.h"

namespace fake {

struct QueueState {
  std::mutex mutex;  // protects all but capacity
  std::condition_variable changed;
  std::deque<Ref<CommandBuffer>> order;  // committed, or with a place reserved by enqueue
  bool has_thread = false;
  bool is_closed = false;
  uint64_t unfinished = 0;  // made, and neither ended nor thrown away
  uint64_t committed = 0;   // of these
  uint64_t capacity = 0;
};

namespace {

// All queues together, for hold and drain.
struct Activity {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t running = 0;  // committed, and not yet done with
  bool is_held = false;
};

Activity& activity() {
  static Activity& all = *new Activity;
  return all;
}

double Now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

CommandBufferStatus StatusOf(CommandBuffer* buffer) {
  std::lock_guard<std::mutex> lock(buffer->mutex);
  return buffer->status;
}

void SetStatus(CommandBuffer* buffer, CommandBufferStatus status) {
  std::lock_guard<std::mutex> lock(buffer->mutex);
  buffer->status = status;
  buffer->changed.notify_all();
}

// ---- Running -------------------------------------------------------------------------

using RunError = std::optional<std::pair<int64_t, std::string>>;

RunError InternalError(const std::string& text) { return {{1, text}}; }

// The buffer of a binding, if it still lives: only unretained ones can be gone.
Buffer* Living(const Binding& binding) {
  if (IsAlive(binding.buffer)) return binding.buffer;
  Fault("a command buffer with unretained references runs, but a buffer that it uses is " +
        NameOf(binding.buffer) + ".");
  return nullptr;
}

RunError RunDispatch(const Command& command) {
  jfm::Device& device = jfm::SoftwareDevice();
  jfm::Dispatch dispatch = {};
  dispatch.pipeline = command.pipeline->software;
  std::vector<std::unique_ptr<jfm::Buffer>> buffers;
  for (const auto& [index, binding] : command.bindings) {
    if (binding.is_bytes) {
      dispatch.bytes.push_back({index, binding.bytes.data(), binding.bytes.size()});
      continue;
    }
    const Buffer* buffer = Living(binding);
    if (buffer == nullptr) return InternalError("a buffer is gone");
    auto wrapped = device.WrapHostMemory(buffer->memory, buffer->length, jfm::Access::kOperand);
    if (!wrapped.ok()) return InternalError(wrapped.status().message());
    dispatch.buffers.push_back({index, wrapped->get(), binding.offset});
    buffers.push_back(std::move(*wrapped));
  }
  const auto size = [](const Size& s) {
    return jfm::Size3{static_cast<uint32_t>(s.width), static_cast<uint32_t>(s.height),
                      static_cast<uint32_t>(s.depth)};
  };
  dispatch.threadgroups = size(command.threadgroups);
  dispatch.threads_per_threadgroup = size(command.threads);
  const std::unique_ptr<jfm::CommandBuffer> software = device.NewCommandBuffer();
  jfm::Status status = software->Encode(dispatch);
  if (status.ok()) status = software->Commit();
  if (status.ok()) status = software->Wait();
  return status.ok() ? RunError() : InternalError(status.message());
}

RunError RunCommand(const Command& command) {
  if (command.kind == Command::Kind::kDispatch) return RunDispatch(command);
  Buffer* to = Living(command.to);
  if (to == nullptr) return InternalError("a buffer is gone");
  if (command.kind == Command::Kind::kFill) {
    std::memset(to->memory + command.to.offset, command.value, command.size);
    return {};
  }
  const Buffer* from = Living(command.from);
  if (from == nullptr) return InternalError("a buffer is gone");
  std::memmove(to->memory + command.to.offset, from->memory + command.from.offset, command.size);
  return {};
}

// Handlers get no autorelease pool: they need one of their own.
void CallHandlers(CommandBuffer* buffer, std::vector<BlockLiteral*>* handlers) {
  for (BlockLiteral* handler : *handlers) {
    reinterpret_cast<void (*)(BlockLiteral*, Object*)>(BlockFunction(handler))(handler, buffer);
    ReleaseBlock(handler);
  }
  handlers->clear();
}

void Run(CommandBuffer* buffer) {
  SetStatus(buffer, kScheduled);
  CallHandlers(buffer, &buffer->scheduled_handlers);
  {
    Activity& all = activity();
    std::unique_lock<std::mutex> lock(all.mutex);
    all.changed.wait(lock, [&] { return !all.is_held; });
  }
  const double start = Now();
  RunError error = buffer->planned_error;
  for (const Command& command : buffer->commands) {
    if (error) break;
    error = RunCommand(command);
  }
  buffer->commands.clear();  // what it retained is released before the handlers run
  std::lock_guard<std::mutex> lock(buffer->mutex);
  buffer->start = start;
  buffer->end = Now();
  buffer->status = error ? kFailed : kCompleted;
  if (error && buffer->planned_error_is_told) {
    auto* object = Make<Error>();
    object->domain = kCommandBufferErrors;
    object->code = error->first;
    object->description = error->second;
    buffer->error = Ref<Error>::Adopt(object);
  }
  buffer->changed.notify_all();
}

void RunQueue(const std::shared_ptr<QueueState>& state) {
  while (true) {
    Ref<CommandBuffer> next;
    {
      std::unique_lock<std::mutex> lock(state->mutex);
      state->changed.wait(lock, [&] {
        if (state->order.empty()) return state->is_closed;
        return StatusOf(state->order.front().get()) >= kCommitted;
      });
      if (state->order.empty()) return;
      next = std::move(state->order.front());
      state->order.pop_front();
    }
    Run(next.get());
    {
      std::lock_guard<std::mutex> lock(state->mutex);
      --state->unfinished;
      --state->committed;
      state->changed.notify_all();
    }
    CallHandlers(next.get(), &next->completed_handlers);
    next = {};  // may be the last reference to the queue itself
    Activity& all = activity();
    std::lock_guard<std::mutex> lock(all.mutex);
    --all.running;
    all.changed.notify_all();
  }
}

// ---- Queues --------------------------------------------------------------------------

CommandQueue* NewQueue(uint64_t capacity) {
  auto* queue = Make<CommandQueue>();
  queue->state = std::make_shared<QueueState>();
  queue->state->capacity = capacity;
  return queue;
}

CommandBuffer* NewCommandBuffer(CommandQueue* self, const Selector* s, bool retains) {
  QueueState& state = *self->state;
  {
    // As documented, the call blocks while the queue has no room.
    std::unique_lock<std::mutex> lock(state.mutex);
    if (state.unfinished >= state.capacity && state.committed == 0) {
      lock.unlock();
      Fault(MethodName(self, s) + ": it would wait for ever: " + std::to_string(state.capacity) +
            " command buffers of the queue are neither committed nor released.");
      return nullptr;
    }
    state.changed.wait(lock, [&] { return state.unfinished < state.capacity; });
    ++state.unfinished;
  }
  auto* buffer = Make<CommandBuffer>();
  buffer->queue = Ref<CommandQueue>(self);
  buffer->queue_state = self->state;
  buffer->retains = retains;
  return Autoreleased(buffer);
}

void DefineQueue(Class& c) {
  DefineLabelled(c);
  c.On(
      "commandBuffer",
      +[](CommandQueue* self, Selector* s) { return NewCommandBuffer(self, s, true); });
  c.On(
      "commandBufferWithUnretainedReferences",
      +[](CommandQueue* self, Selector* s) { return NewCommandBuffer(self, s, false); });
}

// ---- Command buffers -----------------------------------------------------------------

bool IsOpen(CommandBuffer* self, const Selector* s) {
  if (StatusOf(self) < kCommitted) return true;
  Fault(MethodName(self, s) + ": the command buffer is already committed.");
  return false;
}

template <class T>
T* NewEncoder(CommandBuffer* self, const Selector* s) {
  if (!IsOpen(self, s)) return nullptr;
  if (self->open_encoder != nullptr) {
    Fault(MethodName(self, s) + ": a command encoder is already encoding to this command buffer.");
    return nullptr;
  }
  T* encoder = Make<T>();
  encoder->command_buffer = Ref<CommandBuffer>(self);
  self->open_encoder = encoder;
  return Autoreleased(encoder);
}

void AddHandler(CommandBuffer* self, const Selector* s, const void* block,
                std::vector<BlockLiteral*>* handlers) {
  if (StatusOf(self) >= kCommitted) {
    return Fault(MethodName(self, s) + ": a handler is provided after the commit call.");
  }
  if (BlockLiteral* copy = CopyBlock(block, MethodName(self, s))) handlers->push_back(copy);
}

void Plan(CommandBuffer* self, const RunFailure& failure) {
  int64_t code = 1;
  std::string text = failure.message;
  switch (failure.mode) {
    case FAKE_METAL_RUN_ERROR:
    case FAKE_METAL_RUN_NO_ERROR:
      if (text.empty()) text = "Internal Error (0000000e:Internal Error)";
      break;
    case FAKE_METAL_RUN_TIMEOUT:
      code = 2;
      if (text.empty()) text = "Caused GPU Timeout Error (00000002)";
      break;
    case FAKE_METAL_RUN_OUT_OF_MEMORY:
      code = 8;
      if (text.empty()) text = "Insufficient Memory (00000008)";
      break;
    case FAKE_METAL_RUN_PAGE_FAULT:
      code = 3;
      if (text.empty()) text = "Caused GPU Address Fault Error (0000000b)";
      break;
    case FAKE_METAL_RUN_REVOKED:
      code = 4;
      if (text.empty()) text = "Ignored (for causing prior/excessive GPU errors) (00000004)";
      break;
    default:
      return;
  }
  self->planned_error = {code, text};
  self->planned_error_is_told = failure.mode != FAKE_METAL_RUN_NO_ERROR;
}

void Commit(CommandBuffer* self, Selector* s) {
  const RunFailure failure = TakeRunFailure();
  if (StatusOf(self) >= kCommitted) {
    return Fault(MethodName(self, s) + ": commit of an already committed command buffer.");
  }
  if (self->open_encoder != nullptr) {
    return Fault(MethodName(self, s) + ": a command encoder has not ended its encoding.");
  }
  Plan(self, failure);
  {
    Activity& all = activity();
    std::lock_guard<std::mutex> lock(all.mutex);
    ++all.running;
  }
  const std::shared_ptr<QueueState> state = self->queue_state;
  std::lock_guard<std::mutex> lock(state->mutex);
  if (StatusOf(self) == kNotEnqueued) state->order.emplace_back(self);
  SetStatus(self, kCommitted);
  ++state->committed;
  if (!state->has_thread) std::thread([state] { RunQueue(state); }).detach();
  state->has_thread = true;
  state->changed.notify_all();
}

void WaitFor(CommandBuffer* self, Selector* s, CommandBufferStatus status) {
  std::unique_lock<std::mutex> lock(self->mutex);
  if (self->status < kCommitted) {
    lock.unlock();
    return Fault(MethodName(self, s) + ": the command buffer is not committed.");
  }
  self->changed.wait(lock, [&] { return self->status >= status; });
}

void DefineCommandBuffer(Class& c) {
  DefineLabelled(c);
  c.On(
      "computeCommandEncoder", +[](CommandBuffer* self, Selector* s) -> Encoder* {
        return NewEncoder<ComputeEncoder>(self, s);
      });
  c.On(
      "computeCommandEncoderWithDispatchType:",
      +[](CommandBuffer* self, Selector* s, uint64_t type) -> Encoder* {
        if (type > 1) {
          Fault(MethodName(self, s) + ": " + std::to_string(type) + " is no MTLDispatchType.");
          return nullptr;
        }
        auto* encoder = NewEncoder<ComputeEncoder>(self, s);
        if (encoder != nullptr) encoder->concurrent = type == 1;
        return encoder;
      });
  c.On(
      "blitCommandEncoder", +[](CommandBuffer* self, Selector* s) -> Encoder* {
        return NewEncoder<BlitEncoder>(self, s);
      });
  c.On(
      "addScheduledHandler:", +[](CommandBuffer* self, Selector* s, const void* block) {
        AddHandler(self, s, block, &self->scheduled_handlers);
      });
  c.On(
      "addCompletedHandler:", +[](CommandBuffer* self, Selector* s, const void* block) {
        AddHandler(self, s, block, &self->completed_handlers);
      });
  c.On(
      "enqueue", +[](CommandBuffer* self, Selector* s) {
        if (StatusOf(self) != kNotEnqueued) {
          return Fault(MethodName(self, s) + ": the command buffer is already enqueued.");
        }
        std::lock_guard<std::mutex> lock(self->queue_state->mutex);
        self->queue_state->order.emplace_back(self);
        SetStatus(self, kEnqueued);
      });
  c.On("commit", &Commit);
  c.On(
      "waitUntilScheduled",
      +[](CommandBuffer* self, Selector* s) { WaitFor(self, s, kScheduled); });
  c.On(
      "waitUntilCompleted",
      +[](CommandBuffer* self, Selector* s) { WaitFor(self, s, kCompleted); });
  c.On("status", +[](CommandBuffer* self, Selector*) -> uint64_t { return StatusOf(self); });
  c.On(
      "error", +[](CommandBuffer* self, Selector*) {
        std::lock_guard<std::mutex> lock(self->mutex);
        return Lent(self->error.get());
      });
  for (const char* name : {"GPUStartTime", "kernelStartTime"}) {
    c.On(
        name, +[](CommandBuffer* self, Selector*) {
          std::lock_guard<std::mutex> lock(self->mutex);
          return self->start;
        });
  }
  for (const char* name : {"GPUEndTime", "kernelEndTime"}) {
    c.On(
        name, +[](CommandBuffer* self, Selector*) {
          std::lock_guard<std::mutex> lock(self->mutex);
          return self->end;
        });
  }
  c.On("commandQueue", +[](CommandBuffer* self, Selector*) { return Lent(self->queue.get()); });
  c.On("retainedReferences", +[](CommandBuffer* self, Selector*) { return self->retains; });
}

// ---- Encoders ------------------------------------------------------------------------

bool IsOpen(Encoder* self, const Selector* s) {
  if (!self->ended) return true;
  Fault(MethodName(self, s) + ": the encoder has ended its encoding.");
  return false;
}

void DefineEncoder(Class& c) {
  DefineLabelled(c);
  c.On(
      "endEncoding", +[](Encoder* self, Selector* s) {
        if (!IsOpen(self, s)) return;
        self->ended = true;
        self->command_buffer->open_encoder = nullptr;
      });
  for (const char* name : {"insertDebugSignpost:", "pushDebugGroup:"}) {
    c.On(
        name, +[](Encoder* self, Selector* s, Object* text) {
          if (IsOpen(self, s)) Argument<String>(self, s, "the text", text);
        });
  }
  c.On("popDebugGroup", +[](Encoder* self, Selector* s) { IsOpen(self, s); });
}

Binding Bound(const Encoder* self, Buffer* buffer, uint64_t offset) {
  Binding binding;
  binding.buffer = buffer;
  binding.offset = offset;
  if (self->command_buffer->retains) binding.retained = Ref<Buffer>(buffer);
  return binding;
}

bool CheckIndex(Encoder* self, const Selector* s, uint64_t index) {
  if (!IsOpen(self, s)) return false;
  if (index < kMaxBuffers) return true;
  Fault(MethodName(self, s) + ": index " + std::to_string(index) + " must be less than " +
        std::to_string(kMaxBuffers) + ".");
  return false;
}

bool CheckOffset(const Object* self, const Selector* s, const Buffer& buffer, uint64_t offset) {
  if (offset < buffer.length) return true;
  Fault(MethodName(self, s) + ": offset " + std::to_string(offset) +
        " must be less than the buffer's length " + std::to_string(buffer.length) + ".");
  return false;
}

void SetBuffer(ComputeEncoder* self, Selector* s, Object* buffer, uint64_t offset, uint64_t index) {
  if (!CheckIndex(self, s, index)) return;
  bool ok;
  auto* given = OptionalArgument<Buffer>(self, s, "the buffer", buffer, &ok);
  self->bindings.erase(static_cast<unsigned>(index));
  if (!ok || given == nullptr || !CheckOffset(self, s, *given, offset)) return;
  self->bindings[static_cast<unsigned>(index)] = Bound(self, given, offset);
}

void SetBytes(ComputeEncoder* self, Selector* s, const void* bytes, uint64_t length,
              uint64_t index) {
  if (!CheckIndex(self, s, index)) return;
  if (bytes == nullptr || length == 0) {
    return Fault(MethodName(self, s) + ": there are no bytes.");
  }
  if (length > 4096) {
    return Fault(MethodName(self, s) + ": length " + std::to_string(length) +
                 " must be at most 4096; longer data belongs into a buffer.");
  }
  Binding binding;
  binding.is_bytes = true;
  const char* first = static_cast<const char*>(bytes);
  binding.bytes.assign(first, first + length);
  self->bindings[static_cast<unsigned>(index)] = std::move(binding);
}

std::string Text(const Size& size) {
  return "(" + std::to_string(size.width) + ", " + std::to_string(size.height) + ", " +
         std::to_string(size.depth) + ")";
}

// What is wrong with the binding of a buffer that the kernel has; empty if nothing is.
std::string WrongBinding(const KernelBuffer& wanted, const Binding* binding) {
  if (binding == nullptr) return "nothing is bound";
  const uint64_t bytes =
      binding->is_bytes ? binding->bytes.size() : binding->buffer->length - binding->offset;
  if (bytes < wanted.min_bytes) {
    return "it has " + std::to_string(bytes) + " bytes, but the kernel reads " +
           std::to_string(wanted.min_bytes);
  }
  if (binding->offset % wanted.alignment != 0) {
    return "offset " + std::to_string(binding->offset) + " is not a multiple of " +
           std::to_string(wanted.alignment);
  }
  return "";
}

std::string WrongSizes(const ComputeEncoder& self, const Size& groups, const Size& threads) {
  const PipelineState& pipeline = *self.pipeline.get();
  for (const uint64_t count :
       {groups.width, groups.height, groups.depth, threads.width, threads.height, threads.depth}) {
    if (count == 0 || count > UINT32_MAX) {
      return "threadgroups " + Text(groups) + " of threads " + Text(threads) +
             ": each must be at least 1 and fit into 32 bits";
    }
  }
  const uint64_t total = threads.width * threads.height * threads.depth;
  // The product of three can be too large for its type.
  const uint64_t largest = std::max({threads.width, threads.height, threads.depth});
  if (largest > pipeline.max_threads || total > pipeline.max_threads) {
    return "a threadgroup of " + Text(threads) +
           " has more threads than the pipeline's maxTotalThreadsPerThreadgroup, " +
           std::to_string(pipeline.max_threads);
  }
  if (pipeline.multiple_of_width &&
      total % static_cast<uint64_t>(Fact("threadExecutionWidth")) != 0) {
    return std::to_string(total) +
           " threads are not a multiple of threadExecutionWidth, as the "
           "pipeline's descriptor promised";
  }
  auto memory = static_cast<uint64_t>(Fact("staticThreadgroupMemoryLength"));
  for (const auto& [index, length] : self.threadgroup_memory) memory += length;
  if (memory > static_cast<uint64_t>(Fact("maxThreadgroupMemoryLength"))) {
    return std::to_string(memory) + " bytes of threadgroup memory are more than " +
           std::to_string(Fact("maxThreadgroupMemoryLength"));
  }
  return "";
}

void Dispatch(ComputeEncoder* self, Selector* s, Size groups, Size threads) {
  if (!IsOpen(self, s)) return;
  const std::string name = MethodName(self, s) + ": ";
  if (!self->pipeline) return Fault(name + "no compute pipeline state is set.");
  const KernelFacts& kernel = *self->pipeline->kernel;
  if (const std::string wrong = WrongSizes(*self, groups, threads); !wrong.empty()) {
    return Fault(name + kernel.host_name + ": " + wrong + ".");
  }
  Command command;
  command.pipeline = self->pipeline;
  command.threadgroups = groups;
  command.threads = threads;
  std::set<const Buffer*> used;
  for (size_t i = 0; i < kernel.num_buffers; ++i) {
    const KernelBuffer& wanted = kernel.buffers[i];
    if (wanted.condition >= 0 &&
        self->pipeline->constants.at(static_cast<unsigned>(wanted.condition)) == 0) {
      continue;
    }
    const auto found = self->bindings.find(wanted.index);
    const Binding* binding = found == self->bindings.end() ? nullptr : &found->second;
    if (const std::string wrong = WrongBinding(wanted, binding); !wrong.empty()) {
      return Fault(name + kernel.host_name + ": buffer '" + wanted.name + "' at index " +
                   std::to_string(wanted.index) + ": " + wrong + ".");
    }
    command.bindings[wanted.index] = *binding;
    if (!binding->is_bytes) used.insert(binding->buffer);
  }
  if (self->concurrent) {
    for (const Buffer* buffer : used) {
      if (self->unordered.count(buffer) != 0) {
        return Fault(name + kernel.host_name +
                     ": a buffer is used by two dispatches of a concurrent encoder without a "
                     "memory barrier between them.");
      }
    }
    self->unordered.insert(used.begin(), used.end());
  }
  self->command_buffer->commands.push_back(std::move(command));
}

void UseResources(ComputeEncoder* self, const Selector* s, Object* const* resources, uint64_t count,
                  uint64_t usage) {
  if (!IsOpen(self, s)) return;
  if (usage == 0 || usage > 7 || (resources == nullptr && count != 0)) {
    return Fault(MethodName(self, s) + ": usage " + std::to_string(usage) +
                 " is no MTLResourceUsage, or the resources are NULL.");
  }
  for (uint64_t i = 0; i < count; ++i) {
    if (Argument<Buffer>(self, s, "each resource", resources[i]) == nullptr) return;
  }
}

void DefineComputeEncoder(Class& c) {
  DefineEncoder(c);
  c.On(
      "setComputePipelineState:", +[](ComputeEncoder* self, Selector* s, Object* pipeline) {
        if (!IsOpen(self, s)) return;
        auto* given = Argument<PipelineState>(self, s, "the pipeline state", pipeline);
        if (given != nullptr) self->pipeline = Ref<PipelineState>(given);
      });
  c.On("setBuffer:offset:atIndex:", &SetBuffer);
  c.On(
      "setBuffers:offsets:withRange:",
      +[](ComputeEncoder* self, Selector* s, Object* const* buffers, const uint64_t* offsets,
          Range range) {
        if (buffers == nullptr || offsets == nullptr) {
          return Fault(MethodName(self, s) + ": the buffers or offsets are NULL.");
        }
        for (uint64_t i = 0; i < range.length; ++i) {
          SetBuffer(self, s, buffers[i], offsets[i], range.location + i);
        }
      });
  c.On(
      "setBufferOffset:atIndex:",
      +[](ComputeEncoder* self, Selector* s, uint64_t offset, uint64_t index) {
        if (!CheckIndex(self, s, index)) return;
        const auto found = self->bindings.find(static_cast<unsigned>(index));
        if (found == self->bindings.end() || found->second.is_bytes) {
          return Fault(MethodName(self, s) + ": no buffer is bound at index " +
                       std::to_string(index) + ".");
        }
        if (CheckOffset(self, s, *found->second.buffer, offset)) found->second.offset = offset;
      });
  c.On("setBytes:length:atIndex:", &SetBytes);
  c.On(
      "setThreadgroupMemoryLength:atIndex:",
      +[](ComputeEncoder* self, Selector* s, uint64_t length, uint64_t index) {
        if (!CheckIndex(self, s, index)) return;
        if (length % 16 != 0) {
          return Fault(MethodName(self, s) + ": length " + std::to_string(length) +
                       " must be a multiple of 16.");
        }
        self->threadgroup_memory[static_cast<unsigned>(index)] = length;
      });
  c.On("dispatchThreadgroups:threadsPerThreadgroup:", &Dispatch);
  c.On(
      "dispatchThreads:threadsPerThreadgroup:",
      +[](ComputeEncoder* self, Selector* s, Size grid, Size threads) {
        if (threads.width == 0 || threads.height == 0 || threads.depth == 0 ||
            grid.width % threads.width != 0 || grid.height % threads.height != 0 ||
            grid.depth % threads.depth != 0) {
          return Fault(MethodName(self, s) + ": a grid of " + Text(grid) +
                       " has threadgroups of different sizes, of which the software device "
                       "knows nothing.");
        }
        Dispatch(
            self, s,
            {grid.width / threads.width, grid.height / threads.height, grid.depth / threads.depth},
            threads);
      });
  c.On(
      "useResource:usage:", +[](ComputeEncoder* self, Selector* s, Object* resource,
                                uint64_t usage) { UseResources(self, s, &resource, 1, usage); });
  c.On(
      "useResources:count:usage:",
      +[](ComputeEncoder* self, Selector* s, Object* const* resources, uint64_t count,
          uint64_t usage) { UseResources(self, s, resources, count, usage); });
  c.On(
      "memoryBarrierWithScope:", +[](ComputeEncoder* self, Selector* s, uint64_t scope) {
        if (!IsOpen(self, s)) return;
        if ((scope & 1) == 0) return Fault(MethodName(self, s) + ": the scope leaves buffers out.");
        self->unordered.clear();
      });
  c.On(
      "memoryBarrierWithResources:count:",
      +[](ComputeEncoder* self, Selector* s, Object* const* resources, uint64_t count) {
        if (!IsOpen(self, s)) return;
        for (uint64_t i = 0; i < count; ++i) {
          const auto* buffer = Argument<Buffer>(self, s, "each resource", resources[i]);
          if (buffer != nullptr) self->unordered.erase(buffer);
        }
      });
  c.On(
      "dispatchType",
      +[](ComputeEncoder* self, Selector*) -> uint64_t { return self->concurrent ? 1 : 0; });
}

// The part of `buffer` that a blit command names; ok is false, after a fault, if it has none.
Binding Part(BlitEncoder* self, const Selector* s, const char* what, Object* buffer,
             uint64_t offset, uint64_t size, bool* ok) {
  *ok = false;
  auto* given = Argument<Buffer>(self, s, what, buffer);
  if (given == nullptr) return {};
  if (offset > given->length || size > given->length - offset || size == 0) {
    Fault(MethodName(self, s) + ": " + what + ": " + std::to_string(size) + " bytes at offset " +
          std::to_string(offset) + " of a buffer of " + std::to_string(given->length) + ".");
    return {};
  }
  if (offset % 4 != 0 || size % 4 != 0) {
    Fault(MethodName(self, s) + ": " + what + ": offset " + std::to_string(offset) + " and size " +
          std::to_string(size) + " must be multiples of 4 on macOS.");
    return {};
  }
  *ok = true;
  return Bound(self, given, offset);
}

void DefineBlitEncoder(Class& c) {
  DefineEncoder(c);
  c.On(
      "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:",
      +[](BlitEncoder* self, Selector* s, Object* from, uint64_t from_offset, Object* to,
          uint64_t to_offset, uint64_t size) {
        if (!IsOpen(self, s)) return;
        Command command;
        command.kind = Command::Kind::kCopy;
        command.size = size;
        bool ok;
        command.from = Part(self, s, "the source", from, from_offset, size, &ok);
        if (ok) command.to = Part(self, s, "the destination", to, to_offset, size, &ok);
        if (ok) self->command_buffer->commands.push_back(std::move(command));
      });
  c.On(
      "fillBuffer:range:value:",
      +[](BlitEncoder* self, Selector* s, Object* to, Range range, uint8_t value) {
        if (!IsOpen(self, s)) return;
        Command command;
        command.kind = Command::Kind::kFill;
        command.size = range.length;
        command.value = value;
        bool ok;
        command.to = Part(self, s, "the buffer", to, range.location, range.length, &ok);
        if (ok) self->command_buffer->commands.push_back(std::move(command));
      });
  c.On(
      "synchronizeResource:", +[](BlitEncoder* self, Selector* s, Object*) {
        Fault(MethodName(self, s) + ": the storage mode is not managed.");
      });
}

}  // namespace

FAKE_CLASS(CommandQueue, "MTLCommandQueue", &DefineQueue)
FAKE_CLASS(CommandBuffer, "MTLCommandBuffer", &DefineCommandBuffer)
FAKE_CLASS(ComputeEncoder, "MTLComputeCommandEncoder", &DefineComputeEncoder)
FAKE_CLASS(BlitEncoder, "MTLBlitCommandEncoder", &DefineBlitEncoder)

CommandQueue::~CommandQueue() {
  if (state == nullptr) return;
  std::lock_guard<std::mutex> lock(state->mutex);
  state->is_closed = true;
  state->changed.notify_all();
}

CommandBuffer::~CommandBuffer() {
  for (BlockLiteral* handler : scheduled_handlers) ReleaseBlock(handler);
  for (BlockLiteral* handler : completed_handlers) ReleaseBlock(handler);
  if (queue_state == nullptr || status >= kCommitted) return;
  std::lock_guard<std::mutex> lock(queue_state->mutex);
  --queue_state->unfinished;
  queue_state->changed.notify_all();
}

Encoder::~Encoder() {
  if (ended || !command_buffer) return;
  command_buffer->open_encoder = nullptr;
  Fault("a command encoder is released without endEncoding.");
}

void DefineQueueFactories(Class& c) {
  c.On(
      "newCommandQueue", +[](Object*, Selector*) {
        return NewQueue(static_cast<uint64_t>(Fact("maxCommandBufferCount")));
      });
  c.On(
      "newCommandQueueWithMaxCommandBufferCount:",
      +[](Object* self, Selector* s, uint64_t count) -> CommandQueue* {
        if (count != 0) return NewQueue(count);
        Fault(MethodName(self, s) + ": the count must be positive.");
        return nullptr;
      });
}

extern "C" {

FAKE_EXPORT void fake_metal_hold(int yes) {
  Activity& all = activity();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.is_held = yes != 0;
  all.changed.notify_all();
}

FAKE_EXPORT void fake_metal_drain() {
  Activity& all = activity();
  std::unique_lock<std::mutex> lock(all.mutex);
  all.changed.wait(lock, [&] { return all.running == 0; });
}

}  // extern "C"

}  // namespace fake
