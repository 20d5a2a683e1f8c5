// Operations that are done, on their way to callbacks and to letting go of their tensors.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "coordinator/coordinator.h"

namespace multicomm {

// Futures and callbacks are served by one thread, at once. Everything else only has to be released, which a waiter does in
// passing (drain) and the thread does when much has gathered or the engine rests. Holds no engine lock while user code runs.
class CompletionQueue final : public CompletionSink {
 public:
  CompletionQueue();
  ~CompletionQueue();

  void completed(OperationPtr operation) override;
  void drain();  // any thread without a lock or the GIL: finalizes and releases what needs no callback
  void flush();  // wakes the thread for what is left
  void stop();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<OperationPtr> callbacks_;  // guarded by mutex_
  std::vector<OperationPtr> releases_;   // guarded by mutex_
  int64_t release_bytes_ = 0;            // guarded by mutex_
  bool flush_ = false;                   // guarded by mutex_
  bool stopping_ = false;                // guarded by mutex_
  std::atomic<bool> nonempty_{false};
  std::thread thread_;
};

}  // namespace multicomm
