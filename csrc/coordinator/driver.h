// Who runs the coordinator: its own thread, or a caller while it waits.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "coordinator/completion_queue.h"
#include "coordinator/coordinator.h"
#include "coordinator/faults.h"

namespace multicomm {

// Threads and time of the operating system; the simulation has its own, so that it decides every step.
struct ThreadPlatform {
  using Completions = CompletionQueue;
  using Mutex = std::mutex;
  using ConditionVariable = std::condition_variable;
  class Thread {
   public:
    explicit Thread(std::function<void()> body) : thread_(std::move(body)) {
      pthread_setname_np(thread_.native_handle(), "mc-coordinator");
    }
    bool joinable() const { return thread_.joinable(); }
    void join() { thread_.join(); }

   private:
    std::thread thread_;
  };
  static Operation::Clock::time_point now() { return Operation::Clock::now(); }
  static void yield() { sched_yield(); }
  static void sleep_for(std::chrono::microseconds time) { std::this_thread::sleep_for(time); }
  static void point() {}  // another thread may come in between here
};

// One driver at a time holds the drive lock. A waiting caller drives, so that a synchronous operation needs no switch
// of threads; the coordinator thread drives when nobody waits. With nothing active the thread sleeps and looks in every
// kLookIn, so that MPI finishes its acknowledgements and peers are answered.
template <typename Platform>
class BasicDriver {
 public:
  using Clock = Operation::Clock;
  using Completions = typename Platform::Completions;

  BasicDriver(Coordinator& coordinator, Completions& completions, bool oversubscribed)
      : coordinator_(coordinator),
        completions_(completions),
        oversubscribed_(oversubscribed),
        thread_([this] { run(); }) {}
  ~BasicDriver() { stop(); }
  BasicDriver(const BasicDriver&) = delete;
  BasicDriver& operator=(const BasicDriver&) = delete;

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

  // Whether something is outstanding that nobody brings forward before the thread's next look-in; a simulation asks.
  bool unattended() const { return asleep_.load() && waiters_.load() == 0 && coordinator_.active(); }

 private:
  static constexpr std::chrono::microseconds kLookIn{20'000};  // sleeping coordinator: how often MPI gets its progress
  static constexpr std::chrono::milliseconds kGrace{1};        // idle time before the coordinator sleeps
  static constexpr std::chrono::milliseconds kPatience{2};     // fruitless polling before the pauses begin
  static constexpr std::chrono::microseconds kShortestPause{20};
  static constexpr std::chrono::microseconds kLongestPause{1000};

  // From spinning over yielding to short sleeps. When ranks outnumber cores, spinning only keeps the peer from running.
  class Backoff {
   public:
    explicit Backoff(BasicDriver& driver) : driver_(driver), spins_(driver.oversubscribed_ ? 0 : kSpins) {}
    void reset() {
      tries_ = 0;
      pause_ = kShortestPause;
    }
    void wait();

   private:
    static constexpr int kSpins = 200;
    BasicDriver& driver_;
    const int spins_;
    int tries_ = 0;
    std::chrono::microseconds pause_{0};
    Clock::time_point since_;
  };
  // Counts a waiting caller; the last one to leave with work outstanding wakes the thread, since progress must not stop
  // with the waiter that made it: whoever waits for another operation (a future, a peer) would hang.
  class Waiting {
   public:
    explicit Waiting(BasicDriver& driver) : driver_(driver) { driver_.waiters_.fetch_add(1); }
    ~Waiting() {
      Platform::point();
      driver_.waiters_.fetch_sub(1);
      Platform::point();
      if (driver_.coordinator_.active() && !fault(Fault::kNobodyDrives)) driver_.wake();
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    BasicDriver& driver_;
  };

  void run();
  bool try_step();
  void nap(std::chrono::microseconds pause);  // until wake(), at most

  Coordinator& coordinator_;
  Completions& completions_;
  const bool oversubscribed_;
  typename Platform::Mutex drive_mutex_;  // owns everything marked "driver" in Coordinator and GroupState

  typename Platform::Mutex sleep_mutex_;
  typename Platform::ConditionVariable sleep_changed_;
  typename Platform::ConditionVariable nap_ended_;
  std::atomic<int> napping_{0};
  std::atomic<bool> asleep_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<int> waiters_{0};
  typename Platform::Thread thread_;
};

using Driver = BasicDriver<ThreadPlatform>;

template <typename Platform>
template <typename Ready>
bool BasicDriver<Platform>::wait_until(Ready ready, Clock::time_point deadline, const std::function<void()>& check) {
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
        if (Platform::now() >= deadline) return false;
        if (check) check();
      }
      backoff.wait();
    }
  }
  completions_.drain();
  return true;
}

template <typename Platform>
void BasicDriver<Platform>::Backoff::wait() {
  if (++tries_ <= spins_) return Platform::point();
  if (tries_ == spins_ + 1) {
    since_ = Platform::now();
    pause_ = kShortestPause;
  }
  // The clock is read in every 16th try only: reading it costs as much as a poll.
  if (tries_ < spins_ + 1'000'000 && ((tries_ & 15) != 0 || Platform::now() - since_ < kPatience)) {
    Platform::yield();
    return;
  }
  tries_ = spins_ + 1'000'000;
  driver_.nap(pause_);
  pause_ = std::min<std::chrono::microseconds>(pause_ * 3 / 2, kLongestPause);
}

template <typename Platform>
bool BasicDriver<Platform>::try_step() {
  const std::unique_lock lock(drive_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  Platform::point();
  return coordinator_.step(Platform::now());
}

template <typename Platform>
void BasicDriver<Platform>::nap(std::chrono::microseconds pause) {
  std::unique_lock lock(sleep_mutex_);
  napping_.fetch_add(1);
  nap_ended_.wait_for(lock, pause);
  napping_.fetch_sub(1);
}

template <typename Platform>
void BasicDriver<Platform>::wake() {
  if (napping_.load() > 0) {
    const std::lock_guard lock(sleep_mutex_);
    nap_ended_.notify_all();
  }
  if (!asleep_.load()) return;
  {
    const std::lock_guard lock(sleep_mutex_);
    asleep_.store(false);
  }
  sleep_changed_.notify_one();
}

template <typename Platform>
void BasicDriver<Platform>::pace() {
  if (coordinator_.unfinished() <= coordinator_.settings().queue_operations) return;
  for (int i = 0; i < 4; ++i) try_step();
  completions_.drain();
  Platform::sleep_for(kPace);
}

template <typename Platform>
void BasicDriver<Platform>::run() {
  Backoff backoff(*this);
  auto idle_since = Platform::now();
  while (!stopping_.load()) {
    // A waiting caller drives: two pollers would only take the lock and the core from each other.
    if (waiters_.load() == 0 && try_step()) {
      backoff.reset();
      idle_since = Platform::now();
      continue;
    }
    const bool callbacks_wait = completions_.tend();
    const bool active = coordinator_.active();
    Platform::point();
    if (active && waiters_.load() == 0) {
      idle_since = Platform::now();
      backoff.wait();
      continue;
    }
    if (Platform::now() - idle_since < kGrace) {
      Platform::yield();
      continue;
    }
    completions_.flush();
    std::unique_lock lock(sleep_mutex_);
    Platform::point();
    asleep_.store(true);
    Platform::point();
    // Something may have come between the look and the flag; without this second look it would wait for kLookIn.
    if (waiters_.load() > 0 || !coordinator_.active()) {
      sleep_changed_.wait_for(lock, callbacks_wait ? kLongestPause : kLookIn,
                              [this] { return !asleep_.load() || stopping_.load(); });
    }
    asleep_.store(false);
    lock.unlock();
    backoff.reset();
    try_step();
  }
}

template <typename Platform>
void BasicDriver<Platform>::stop() {
  {
    const std::lock_guard lock(sleep_mutex_);
    stopping_.store(true);
  }
  sleep_changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

}  // namespace multicomm
