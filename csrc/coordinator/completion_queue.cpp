#include "coordinator/completion_queue.h"

#include <pthread.h>

#include <utility>

namespace multicomm {
namespace {

constexpr size_t kManyReleases = 64;
constexpr int64_t kMuchMemory = 1 << 20;

void finalize_all(std::vector<OperationPtr>& operations) {
  for (OperationPtr& operation : operations) {
    if (operation->claim_finalize()) operation->finalize();
    operation.reset();
  }
  operations.clear();
}

}  // namespace

CompletionQueue::CompletionQueue() : thread_([this] { run(); }) {
  pthread_setname_np(thread_.native_handle(), "mc-completion");
}

CompletionQueue::~CompletionQueue() { stop(); }

void CompletionQueue::completed(OperationPtr operation) {
  bool notify;
  {
    const std::lock_guard lock(mutex_);
    if (operation->completion_wanted()) {
      callbacks_.push_back(std::move(operation));
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
    if (callbacks_.empty() && releases_.empty() && stopping_) return;
    taken.swap(callbacks_);
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
  }
}

void CompletionQueue::stop() {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_ && !thread_.joinable()) return;
    stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

}  // namespace multicomm
