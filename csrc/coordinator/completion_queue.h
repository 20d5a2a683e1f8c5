// Operations that are done, on their way to callbacks and to letting go of their tensors.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "coordinator/coordinator.h"

namespace multicomm {

// Futures and callbacks are served by one thread, at once; a callback may itself wait for another future (PowerSGD's
// hook does), so while it does another thread takes its place. Everything else only has to be released, which a waiter
// does in passing (drain) and the thread does when much has gathered or the engine rests. Holds no engine lock while
// user code runs.
class CompletionQueue final : public CompletionSink {
 public:
  CompletionQueue();
  ~CompletionQueue();

  void completed(OperationPtr operation) override;
  void launched(const OperationPtr& operation) override;
  void drain();  // any thread without a lock or the GIL: finalizes and releases what needs no callback
  void flush();  // wakes the thread for what is left
  // Called by the coordinator now and then: starts another thread when callbacks wait behind one that does not return.
  // True while callbacks wait.
  bool tend();
  // Ends the threads. One that is in a callback which does not return within `bound` is left there: user code must not
  // hold up the end of the process.
  void stop(std::chrono::milliseconds bound);

 private:
  void run();
  void add_thread();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<OperationPtr> callbacks_;                   // guarded by mutex_; also those that are launched only
  std::vector<OperationPtr> releases_;                   // guarded by mutex_
  int64_t release_bytes_ = 0;                            // guarded by mutex_
  bool flush_ = false;                                   // guarded by mutex_
  bool stopping_ = false;                                // guarded by mutex_
  uint64_t served_ = 0;                                  // guarded by mutex_
  uint64_t seen_served_ = 0;                             // the coordinator's
  std::chrono::steady_clock::time_point stuck_since_{};  // the coordinator's
  std::vector<std::thread> threads_;                     // guarded by mutex_
  size_t ended_ = 0;                                     // guarded by mutex_; of the threads
  std::atomic<bool> nonempty_{false};
  std::atomic<bool> callbacks_waiting_{false};
};

}  // namespace multicomm
