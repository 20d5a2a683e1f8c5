// Streams for the double's own tests, in C.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "nccl_types.h"

namespace multicomm::tests {
namespace {

struct Stream : DeviceStream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<void (*)(void*), void*>> tasks;  // under the mutex, the running one included
  bool closed = false;                                  // under the mutex
  std::thread worker;

  Stream() : DeviceStream{add}, worker([this] { loop(); }) {}

  static void add(DeviceStream* self, void (*run)(void*), void* argument) {
    auto& stream = *static_cast<Stream*>(self);
    const std::scoped_lock lock(stream.mutex);
    stream.tasks.emplace_back(run, argument);
    stream.changed.notify_all();
  }

  void loop() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return closed || !tasks.empty(); });
      if (tasks.empty()) return;
      const auto [run, argument] = tasks.front();
      lock.unlock();
      run(argument);
      lock.lock();
      tasks.pop_front();
      changed.notify_all();
    }
  }
};

}  // namespace
}  // namespace multicomm::tests

using multicomm::tests::Stream;

extern "C" {
NCCL_DOUBLE_API void* nccl_double_stream() { return new Stream; }

// Whether the stream has become idle within the time.
NCCL_DOUBLE_API int nccl_double_stream_wait(void* handle, double seconds) {
  auto& stream = *static_cast<Stream*>(handle);
  std::unique_lock lock(stream.mutex);
  return stream.changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return stream.tasks.empty(); });
}

// After what it has been given.
NCCL_DOUBLE_API void nccl_double_stream_close(void* handle) {
  auto* stream = static_cast<Stream*>(handle);
  {
    const std::scoped_lock lock(stream->mutex);
    stream->closed = true;
    stream->changed.notify_all();
  }
  stream->worker.join();
  delete stream;
}
}
