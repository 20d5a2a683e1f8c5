// Who runs the coordinator: its own thread, or a caller while it waits.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "coordinator/completion_queue.h"
#include "coordinator/coordinator.h"

namespace multicomm {

// One driver at a time holds the drive lock. A waiting caller drives, so that a synchronous operation needs no switch
// of threads; the coordinator thread drives when nobody waits. With nothing active the thread sleeps and looks in every
// kLookIn, so that MPI finishes its acknowledgements and peers are answered.
class Driver {
 public:
  using Clock = Operation::Clock;

  Driver(Coordinator& coordinator, CompletionQueue& completions, bool oversubscribed);
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Waits until `ready()`, driving. False when `deadline` passes first: only the caller gives up. Called without the
  // GIL and without any lock of ours. `check` is called now and then and may throw.
  template <typename Ready>
  bool wait_until(Ready ready, Clock::time_point deadline, const std::function<void()>& check = {});
  // Tells the thread that something was submitted for which no caller is about to wait, and callers that nap between
  // their looks that there is something to do.
  void wake();
  // After a submission: slows a submitter down that is far ahead of its peers (MULTICOMM_QUEUE_OPERATIONS) by a few
  // steps, never by a wait for somebody (two ranks that fill their queues in different groups would wait for each
  // other).
  void pace();
  static constexpr std::chrono::microseconds kPace{50};
  void stop();

 private:
  // From spinning over yielding to short sleeps. When ranks outnumber cores, spinning only keeps the peer from running.
  class Backoff {
   public:
    explicit Backoff(Driver& driver) : driver_(driver), spins_(driver.oversubscribed_ ? 0 : kSpins) {}
    void reset();
    void wait();

   private:
    static constexpr int kSpins = 200;
    Driver& driver_;
    const int spins_;
    int tries_ = 0;
    std::chrono::microseconds pause_{0};
    Clock::time_point since_;
  };
  // Counts a waiting caller; the last one to leave with work outstanding wakes the thread, since progress must not stop
  // with the waiter that made it: whoever waits for another operation (a future, a peer) would hang.
  class Waiting {
   public:
    explicit Waiting(Driver& driver) : driver_(driver) { driver_.waiters_.fetch_add(1); }
    ~Waiting() {
      driver_.waiters_.fetch_sub(1);
      if (driver_.coordinator_.active()) driver_.wake();
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    Driver& driver_;
  };

  void run();
  bool try_step();
  void nap(std::chrono::microseconds pause);  // until wake(), at most

  Coordinator& coordinator_;
  CompletionQueue& completions_;
  const bool oversubscribed_;
  std::mutex drive_mutex_;  // owns everything marked "driver" in Coordinator and GroupState

  std::mutex sleep_mutex_;
  std::condition_variable sleep_changed_;
  std::condition_variable nap_ended_;
  std::atomic<int> napping_{0};
  std::atomic<bool> asleep_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<int> waiters_{0};
  std::thread thread_;
};

template <typename Ready>
bool Driver::wait_until(Ready ready, Clock::time_point deadline, const std::function<void()>& check) {
  {
    const Waiting waiting(*this);
    Backoff backoff(*this);
    int tries = 0;
    while (!ready()) {
      if (try_step()) {
        backoff.reset();
        continue;
      }
      if (ready()) break;
      if ((++tries & 63) == 0) {
        if (Clock::now() >= deadline) return false;
        if (check) check();
      }
      backoff.wait();
    }
  }
  completions_.drain();
  return true;
}

}  // namespace multicomm
