// The thread that alone enqueues work on a device, in agreed order.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transport/poller.h"

namespace multicomm::device {

// What launchers have to tell the driver. One per process.
class Reports final : public Poller {
 public:
  explicit Reports(std::function<void()> wake) : wake_(std::move(wake)) {}
  void add(std::function<void()> report);  // any thread
  size_t poll() override;                  // driver: runs them, in order
  // Work beside the launchers, for which the end of the process waits.
  void begin_beside();
  void end_beside();
  void await_beside(std::chrono::milliseconds bound);

 private:
  const std::function<void()> wake_;
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::vector<std::function<void()>> reports_;  // guarded by mutex_
  std::condition_variable none_beside_;
  int beside_ = 0;  // guarded by mutex_
};

// Everything that touches the device happens on this thread: a call that waits (for a peer, for room in the device's
// queue) holds up neither the driver nor a caller. Ends with the process.
class Launcher {
 public:
  Launcher(c10::Device device, bool high_priority, Reports& reports);
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  using Task = std::function<void()>;
  // Driver: runs `task` after those before it, with the device and the communication stream current. A task deals with
  // its own errors.
  void post(Task task);
  uint64_t posted() const { return posted_; }  // driver: how many tasks there have been
  // Any thread: runs `work` on a thread of its own with the device current; where none can be had, not at all.
  void beside(std::function<void()> work);
  Reports& reports() { return reports_; }
  c10::Device device() const { return device_; }

  // --- tasks only ---
  void
  attend();  // reports what has come to pass, and lets the watchers look when it is time; also for a task that waits
  const c10::Stream& stream() const;                      // throws where the device could not be used from the start
  void* native_stream() const { return native_stream_; }  // as the device's own libraries know it
  std::shared_ptr<c10::Event> record();                   // of the stream as it is now
  // Runs `then` on this thread when the event has come to pass; or when the device refuses to say, with its error.
  void when_done(std::shared_ptr<c10::Event> event, std::function<void(const std::string* error)> then);
  // Runs `look` every kLook, until as many calls of unwatch() as of watch().
  void watch(const void* owner, std::function<void()> look);
  void unwatch(const void* owner);

 private:
  struct Awaited {
    std::shared_ptr<c10::Event> event;
    std::function<void(const std::string*)> then;
  };
  static constexpr std::chrono::milliseconds kLook{50};
  void run();
  bool query();

  const c10::Device device_;
  const bool high_priority_;
  Reports& reports_;
  uint64_t posted_ = 0;  // driver
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;  // guarded by mutex_

  // The thread's own.
  std::unique_ptr<c10::Stream> stream_;
  std::string start_error_;
  void* native_stream_ = nullptr;
  std::chrono::steady_clock::time_point next_look_{};
  std::deque<Awaited> awaited_;  // in the order of the stream, so only the first is asked
  struct Watcher {
    std::function<void()> look;
    int count = 0;
  };
  std::map<const void*, Watcher> watchers_;
};

// The launchers of the devices in use.
class Launchers {
 public:
  Launchers(bool high_priority, std::function<void()> wake)
      : high_priority_(high_priority), reports_(std::move(wake)) {}
  Launcher& of(c10::Device device);  // driver
  Reports& reports() { return reports_; }

 private:
  const bool high_priority_;
  Reports reports_;
  std::map<c10::DeviceIndex, std::unique_ptr<Launcher>> launchers_;
};

// The stream as the device's own libraries know it. torch has renamed this.
template <typename Stream>
void* native_handle(const Stream& stream) {
  if constexpr (requires { stream.native_handle(); }) return stream.native_handle();
  else return stream.stream_handle();
}

// A function of a library that the process has loaded, such as the driver of the device; null where it has not.
void* loaded_symbol(const char* library_prefix, const char* name);

}  // namespace multicomm::device
