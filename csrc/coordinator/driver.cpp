#include "coordinator/driver.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>

namespace multicomm {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::microseconds kLookIn = 20ms;  // sleeping coordinator: how often MPI gets its progress
constexpr auto kGrace = 1ms;                         // idle time before the coordinator sleeps
constexpr auto kPatience = 2ms;                      // fruitless polling before the pauses begin
constexpr std::chrono::microseconds kShortestPause = 20us;
constexpr std::chrono::microseconds kLongestPause = 1ms;

}  // namespace

void Driver::Backoff::reset() {
  tries_ = 0;
  pause_ = kShortestPause;
}

void Driver::Backoff::wait() {
  if (++tries_ <= spins_) return;
  if (tries_ == spins_ + 1) {
    since_ = Clock::now();
    pause_ = kShortestPause;
  }
  // The clock is read in every 16th try only: reading it costs as much as a poll.
  if (tries_ < spins_ + 1'000'000 && ((tries_ & 15) != 0 || Clock::now() - since_ < kPatience)) {
    sched_yield();
    return;
  }
  tries_ = spins_ + 1'000'000;
  driver_.nap(pause_);
  pause_ = std::min<std::chrono::microseconds>(pause_ * 3 / 2, kLongestPause);
}

Driver::Driver(Coordinator& coordinator, CompletionQueue& completions, bool oversubscribed)
    : coordinator_(coordinator),
      completions_(completions),
      oversubscribed_(oversubscribed),
      thread_([this] { run(); }) {
  pthread_setname_np(thread_.native_handle(), "mc-coordinator");
}

Driver::~Driver() { stop(); }

bool Driver::try_step() {
  const std::unique_lock lock(drive_mutex_, std::try_to_lock);
  return lock.owns_lock() && coordinator_.step(Clock::now());
}

void Driver::nap(std::chrono::microseconds pause) {
  std::unique_lock lock(sleep_mutex_);
  napping_.fetch_add(1);
  nap_ended_.wait_for(lock, pause);
  napping_.fetch_sub(1);
}

void Driver::wake() {
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

void Driver::pace() {
  if (coordinator_.unfinished() <= coordinator_.settings().queue_operations) return;
  for (int i = 0; i < 4; ++i) try_step();
  completions_.drain();
  std::this_thread::sleep_for(kPace);
}

void Driver::run() {
  Backoff backoff(*this);
  auto idle_since = Clock::now();
  while (!stopping_.load()) {
    // A waiting caller drives: two pollers would only take the lock and the core from each other.
    if (waiters_.load() == 0 && try_step()) {
      backoff.reset();
      idle_since = Clock::now();
      continue;
    }
    const bool callbacks_wait = completions_.tend();
    const bool active = coordinator_.active();
    if (active && waiters_.load() == 0) {
      idle_since = Clock::now();
      backoff.wait();
      continue;
    }
    if (Clock::now() - idle_since < kGrace) {
      sched_yield();
      continue;
    }
    completions_.flush();
    std::unique_lock lock(sleep_mutex_);
    asleep_.store(true);
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

void Driver::stop() {
  {
    const std::lock_guard lock(sleep_mutex_);
    stopping_.store(true);
  }
  sleep_changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

}  // namespace multicomm
