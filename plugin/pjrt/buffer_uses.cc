// Two maps under one lock; empty, and then free of charge, when nothing is pending.
#include "plugin/pjrt/buffer_uses.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <unordered_map>

#include "plugin/pjrt/host.h"

namespace jfm::pjrt {
namespace {

struct Use {
  int count = 0;
  bool is_deleted = false;    // for the caller
  bool is_destroyed = false;  // the caller will not name it again
};

std::mutex mutex;  // guards the maps and next_promise
std::condition_variable& changed = *new std::condition_variable;
auto& uses = *new std::unordered_map<PJRT_Buffer*, Use>;
auto& promises = *new std::unordered_map<PJRT_Buffer*, PromiseId>;
PromiseId next_promise = 1;
// The size of both, to be read without the lock: a caller that has a buffer has also seen
// the end of the Execute that put it into a map.
std::atomic<size_t> num_pending{0};

void CountPending() { num_pending.store(uses.size() + promises.size()); }

Use* Find(PJRT_Buffer* buffer) {
  const auto found = uses.find(buffer);
  return found == uses.end() ? nullptr : &found->second;
}

Status GivenAway() { return InvalidArgument("Buffer has been deleted or donated."); }

}  // namespace

Result<std::vector<bool>> AcquireBuffers(const Host& host,
                                         const std::vector<PJRT_Buffer*>& arguments,
                                         const std::vector<bool>& donated) {
  for (PJRT_Buffer* buffer : arguments) {
    PJRT_Buffer_IsDeleted_Args args = {};
    args.buffer = buffer;
    if (Status status = host.Call(args); !status.ok()) return status;
    if (args.is_deleted) return GivenAway();
  }
  std::vector<bool> expendable = donated;
  std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const Use* use = Find(arguments[i]);
    if (use != nullptr && use->is_deleted) return GivenAway();
    if (use != nullptr) expendable[i] = false;
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    Use& use = uses[arguments[i]];
    ++use.count;
    if (donated[i]) use.is_deleted = true;
  }
  CountPending();
  return expendable;
}

void ReleaseBuffers(const Host& host, const std::vector<PJRT_Buffer*>& arguments) {
  std::vector<PJRT_Buffer*> to_delete;
  std::vector<PJRT_Buffer*> to_destroy;
  const auto end_use = [&to_destroy](PJRT_Buffer* buffer) {
    if (uses[buffer].is_destroyed) {
      promises.erase(buffer);
      to_destroy.push_back(buffer);
    }
    uses.erase(buffer);
  };
  // The host is called without the lock: whoever lent it the memory may be told, and then
  // call us.
  std::unique_lock<std::mutex> lock(mutex);
  for (PJRT_Buffer* buffer : arguments) {
    Use& use = uses[buffer];
    if (--use.count > 0) continue;
    if (use.is_deleted && !use.is_destroyed) {
      to_delete.push_back(buffer);  // stays in the map, for nobody to see it undeleted
    } else {
      end_use(buffer);
    }
  }
  lock.unlock();
  for (PJRT_Buffer* buffer : to_delete) {
    PJRT_Buffer_Delete_Args args = {};
    args.buffer = buffer;
    (void)host.Call(args);  // deleted already, where the host reused its memory
  }
  lock.lock();
  for (PJRT_Buffer* buffer : to_delete) end_use(buffer);
  CountPending();
  changed.notify_all();
  lock.unlock();
  // Out of the maps by now: the host may give the handle to another buffer.
  for (PJRT_Buffer* buffer : to_destroy) {
    PJRT_Buffer_Destroy_Args args = {};
    args.buffer = buffer;
    (void)host.Call(args);
  }
}

PromiseId NotePromise(PJRT_Buffer* buffer) {
  std::lock_guard<std::mutex> lock(mutex);
  promises[buffer] = next_promise;
  CountPending();
  return next_promise++;
}

void PromiseIsKept(PromiseId id) {
  std::lock_guard<std::mutex> lock(mutex);
  // By its number: the handle may be another buffer's by now.
  for (auto promise = promises.begin(); promise != promises.end(); ++promise) {
    if (promise->second != id) continue;
    promises.erase(promise);
    break;
  }
  CountPending();
  changed.notify_all();
}

bool DeleteLater(PJRT_Buffer* buffer) {
  if (num_pending.load() == 0) return false;
  std::lock_guard<std::mutex> lock(mutex);
  Use* use = Find(buffer);
  if (use == nullptr) return false;
  use->is_deleted = true;
  return true;
}

bool DestroyLater(PJRT_Buffer* buffer) {
  if (num_pending.load() == 0) return false;
  std::lock_guard<std::mutex> lock(mutex);
  Use* use = Find(buffer);
  if (use == nullptr) {
    // Whoever has this handle next must not wait for the promise.
    promises.erase(buffer);
    CountPending();
    return false;
  }
  use->is_destroyed = true;
  return true;
}

bool IsGivenAway(PJRT_Buffer* buffer) {
  if (num_pending.load() == 0) return false;
  std::lock_guard<std::mutex> lock(mutex);
  const Use* use = Find(buffer);
  return use != nullptr && use->is_deleted;
}

Status PrepareForHost(PJRT_Buffer* const* arguments, size_t num_arguments, bool may_overwrite) {
  if (num_pending.load() == 0) return {};
  std::unique_lock<std::mutex> lock(mutex);
  for (size_t i = 0; i < num_arguments; ++i) {
    const Use* use = Find(arguments[i]);
    if (use != nullptr && use->is_deleted) return GivenAway();
  }
  for (size_t i = 0; i < num_arguments; ++i) {
    PJRT_Buffer* buffer = arguments[i];
    changed.wait(lock, [buffer, may_overwrite] {
      return promises.count(buffer) == 0 && (!may_overwrite || Find(buffer) == nullptr);
    });
  }
  return {};
}

}  // namespace jfm::pjrt
