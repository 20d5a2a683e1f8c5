// Threads of the simulation: one runs at a time, and a seeded scheduler decides which goes on wherever a real thread
// could be interrupted. Time is virtual.
#pragma once

#include <ucontext.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/operation.h"

namespace multicomm::sim {

using Random = std::mt19937_64;
using TimePoint = Operation::Clock::time_point;

class Scheduler {
 public:
  explicit Scheduler(Random& random);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  class Fiber;
  // `rank`: whose it is; all fibers of a rank are stopped and continued together.
  Fiber* spawn(int rank, std::string name, std::function<void()> body);
  void stop(int rank);  // as SIGSTOP does; for ever, as SIGKILL does
  void go_on(int rank);

  // Runs until `over()`, or until `limit`; throws what a fiber threw. `outside` stands for what no thread does (a
  // network): it does one thing, or returns false; `share` of 64 steps are its own. `resting` is told before time jumps
  // because nothing can go on.
  void run(const std::function<bool()>& over, TimePoint limit, const std::function<bool()>& outside, unsigned share,
           const std::function<void()>& resting);
  // Ends, by an exception, all fibers that have not ended.
  void unwind();

  TimePoint now() const { return now_; }
  uint64_t steps() const { return steps_; }
  std::vector<std::string> unfinished() const;  // names of the fibers that have not ended
  static bool ended(const Fiber* fiber);
  static Scheduler& current() { return *current_; }
  bool unwinding() const { return unwinding_; }

  // --- from a fiber ---
  // While fibers are unwound, these two throw; the others do nothing, since destructors call them.
  void yield();
  void sleep_until(TimePoint time);
  void wait_a_little();
  void sleep_about(std::chrono::microseconds time);  // or much longer, as on a loaded machine
  void point();                                      // may switch to another fiber
  Fiber* self() { return running_; }
  void wake(Fiber* sleeper);

 private:
  struct Unwind {};
  void resume(Fiber* fiber);
  void leave();  // back to run()
  static void enter();

  static Scheduler* current_;
  Random& random_;
  TimePoint now_{};
  uint64_t steps_ = 0;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> able_;  // reused by run()
  Fiber* running_ = nullptr;
  ucontext_t home_{};
  void* home_fake_stack_ = nullptr;
  const void* home_stack_ = nullptr;
  size_t home_size_ = 0;
  std::exception_ptr failure_;
  bool unwinding_ = false;
};

// What BasicDriver needs of threads and time.
struct FiberPlatform {
  struct Completions {  // finished operations are finalized in place
    void drain() {}
    void flush() {}
    bool tend() { return false; }
  };
  class Mutex {
   public:
    bool try_lock() { return !std::exchange(locked_, true); }
    void lock() {
      while (!try_lock() && !Scheduler::current().unwinding()) Scheduler::current().wait_a_little();
    }
    void unlock() { locked_ = false; }

   private:
    bool locked_ = false;
  };
  class ConditionVariable {
   public:
    void notify_one() {
      if (!waiters_.empty()) Scheduler::current().wake(waiters_.front());
    }
    void notify_all() {
      for (Scheduler::Fiber* waiter : waiters_) Scheduler::current().wake(waiter);
    }
    // Until notified, or about as long: as on a loaded machine.
    void wait_for(std::unique_lock<Mutex>& lock, std::chrono::microseconds time) {
      park(lock, [time] { Scheduler::current().sleep_about(time); });
    }
    template <typename Predicate>
    void wait_for(std::unique_lock<Mutex>& lock, std::chrono::microseconds time, Predicate done) {
      Scheduler& scheduler = Scheduler::current();
      const TimePoint end = scheduler.now() + time;
      while (!done() && scheduler.now() < end) park(lock, [&] { scheduler.sleep_until(end); });
    }

   private:
    template <typename Sleep>
    void park(std::unique_lock<Mutex>& lock, Sleep sleep) {
      Scheduler::Fiber* self = Scheduler::current().self();
      waiters_.push_back(self);
      lock.unlock();
      sleep();
      lock.lock();
      std::erase(waiters_, self);
    }

    std::vector<Scheduler::Fiber*> waiters_;
  };
  class Thread {
   public:
    explicit Thread(std::function<void()> body)
        : fiber_(Scheduler::current().spawn(rank_of_next, "coordinator", std::move(body))) {}
    bool joinable() const { return !Scheduler::ended(fiber_); }
    void join() {
      while (!Scheduler::ended(fiber_)) Scheduler::current().yield();
    }
    static inline int rank_of_next = 0;

   private:
    Scheduler::Fiber* fiber_;
  };
  static TimePoint now() { return Scheduler::current().now(); }
  static void yield() { Scheduler::current().yield(); }
  static void sleep_for(std::chrono::microseconds time) { Scheduler::current().sleep_about(time); }
  static void point() { Scheduler::current().point(); }
};

}  // namespace multicomm::sim
