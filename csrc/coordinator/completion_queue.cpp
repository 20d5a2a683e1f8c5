#include "coordinator/completion_queue.h"

#include <pthread.h>

#include <utility>

namespace multicomm {
namespace {

constexpr size_t kManyReleases = 64;
constexpr int64_t kMuchMemory = 1 << 20;
constexpr size_t kMostThreads = 32;  // nested waits deeper than this are not a program's intention
constexpr std::chrono::milliseconds kPatience{2};
constexpr std::chrono::hours kNoBound{24};

void finalize_all(std::vector<OperationPtr>& operations) {
  for (OperationPtr& operation : operations) {
    if (!operation->done()) {
      if (operation->claim_finalize_launch()) operation->finalize_launch();
    } else if (operation->claim_finalize()) {
      operation->finalize();
    }
    operation.reset();
  }
  operations.clear();
}

}  // namespace

CompletionQueue::CompletionQueue() { add_thread(); }

void CompletionQueue::add_thread() {
  const std::lock_guard lock(mutex_);
  if (stopping_) return;
  threads_.emplace_back([this] { run(); });
  pthread_setname_np(threads_.back().native_handle(), "mc-completion");
}

bool CompletionQueue::tend() {
  if (!callbacks_waiting_.load(std::memory_order_relaxed)) {
    stuck_since_ = {};
    return false;
  }
  const auto now = std::chrono::steady_clock::now();
  bool stuck;
  {
    const std::lock_guard lock(mutex_);
    stuck = served_ == seen_served_ && threads_.size() < kMostThreads;
    seen_served_ = served_;
  }
  if (!stuck || stuck_since_ == std::chrono::steady_clock::time_point{}) {
    stuck_since_ = now;
  } else if (now - stuck_since_ > kPatience) {
    stuck_since_ = {};
    add_thread();
  }
  return true;
}

CompletionQueue::~CompletionQueue() { stop(kNoBound); }

void CompletionQueue::completed(OperationPtr operation) {
  bool notify;
  {
    const std::lock_guard lock(mutex_);
    if (operation->completion_wanted()) {
      callbacks_.push_back(std::move(operation));
      callbacks_waiting_.store(true, std::memory_order_relaxed);
      notify = true;
    } else {
      release_bytes_ += operation->bytes();
      releases_.push_back(std::move(operation));
      nonempty_.store(true, std::memory_order_relaxed);
      notify = releases_.size() == kManyReleases || release_bytes_ >= kMuchMemory;
      if (notify) flush_ = true;
    }
  }
  if (notify) changed_.notify_one();
}

// Only futures want to know; one that is asked for later finds it launched.
void CompletionQueue::launched(const OperationPtr& operation) {
  if (!operation->completion_wanted()) return;
  {
    const std::lock_guard lock(mutex_);
    callbacks_.push_back(operation);
    callbacks_waiting_.store(true, std::memory_order_relaxed);
  }
  changed_.notify_one();
}

void CompletionQueue::drain() {
  if (!nonempty_.load(std::memory_order_relaxed)) return;
  std::vector<OperationPtr> taken;
  {
    const std::lock_guard lock(mutex_);
    taken.swap(releases_);
    release_bytes_ = 0;
    nonempty_.store(false, std::memory_order_relaxed);
  }
  finalize_all(taken);
}

void CompletionQueue::flush() {
  if (!nonempty_.load(std::memory_order_relaxed)) return;
  {
    const std::lock_guard lock(mutex_);
    flush_ = true;
  }
  changed_.notify_one();
}

void CompletionQueue::run() {
  std::vector<OperationPtr> taken;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !callbacks_.empty() || flush_ || stopping_; });
    if (callbacks_.empty() && releases_.empty() && stopping_) break;
    // One at a time: what is taken along waits behind a callback that blocks.
    if (!callbacks_.empty()) {
      taken.push_back(std::move(callbacks_.front()));
      callbacks_.pop_front();
      callbacks_waiting_.store(!callbacks_.empty(), std::memory_order_relaxed);
    }
    if (flush_ || stopping_) {
      taken.insert(taken.end(), std::make_move_iterator(releases_.begin()), std::make_move_iterator(releases_.end()));
      releases_.clear();
      release_bytes_ = 0;
      nonempty_.store(false, std::memory_order_relaxed);
      flush_ = false;
    }
    lock.unlock();
    finalize_all(taken);
    lock.lock();
    ++served_;
  }
  ++ended_;
  changed_.notify_all();
}

void CompletionQueue::stop(std::chrono::milliseconds bound) {
  std::vector<std::thread> threads;
  bool all = true;
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    threads.swap(threads_);
    changed_.notify_all();
    all = changed_.wait_for(lock, bound, [&] { return ended_ >= threads.size(); });
  }
  for (std::thread& thread : threads) {
    if (all) thread.join();
    else thread.detach();
  }
}

}  // namespace multicomm
