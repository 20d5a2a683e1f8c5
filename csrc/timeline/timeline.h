// Records what the engine does, and writes it to a file beside it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "coordinator/trace.h"
#include "timeline/chrome_trace.h"
#include "timeline/trace_file.h"

namespace multicomm::timeline {

// The driver only leaves a note of what has happened; a thread with the lowest priority turns it into text and writes
// it, 10 times a second. What finds no room for its
// note is counted, and the count written.
class Timeline final : public Trace {
 public:
  Timeline() = default;
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // --- any thread ---
  // Begins a file in `folder`, which is made if need be, and returns its path. Throws std::runtime_error.
  std::string start(const std::string& folder, const Origin& origin);
  // Returns once everything is written. The engine must have let go of it. Without a start: nothing.
  void stop();
  // What the maker of a group calls it; before its first operation.
  void describe(uint64_t group, const std::string& description);

  // --- driver ---
  int64_t now() override;
  void round_over(const GroupState& group, const RoundTrail& round) override;
  void batch_over(const GroupState& group, const BatchTrail& batch) override;
  void operation_over(const GroupState& group, const Operation& operation, OperationEnd end,
                      const OperationError* error) override;

 private:
  struct Output {
    TraceFile file;
    ChromeTrace trace;
    bool failed = false;
  };
  void note(const GroupState& group, Event event);
  void introduce(const GroupState& group);
  bool push(Event event);
  void run();
  template <typename Write>
  void guarded(Write write);
  void write_new();

  std::mutex control_mutex_;  // one start or stop at a time
  std::thread thread_;        // guarded by control_mutex_

  // A ring with one writer, the driver, and one reader, the thread: neither ever waits for the other, which, at its
  // priority, may not run for long.
  std::vector<Event> ring_;
  std::atomic<uint64_t> filled_{0};  // events so far
  std::atomic<uint64_t> taken_{0};   // of those
  std::atomic<uint64_t> lost_{0};
  std::atomic<uint64_t> file_number_{0};
  uint64_t known_file_ = 0;     // driver; the file in which it has told of the groups in known_
  std::vector<uint8_t> known_;  // driver; by group: told, told with its identity

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> stopping_{false};             // set under mutex_
  std::map<uint64_t, std::string> descriptions_;  // guarded by mutex_
  std::unique_ptr<Output> output_;                // the thread's while it runs, then of whoever stops it
};

}  // namespace multicomm::timeline
