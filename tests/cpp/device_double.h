// A device of its own for every rank of one node: runs what it is given strictly in launch order, and blocks in each
// batch until all members have come, as NCCL's kernels do on one stream. What it cannot show: NCCL's own calls, real
// streams and events.
#pragma once

#include <mpi.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transport/transport.h"

namespace multicomm::tests {

inline constexpr size_t kMostGroups = 16;
inline constexpr size_t kMostMembers = 8;
inline constexpr size_t kMostElements = 1024;  // of a batch

// In memory that all ranks share. A member brings its input, counts itself in, and reads the others' when all have
// come; with two places per member, nobody overwrites what another still reads: a device is in one batch at a time.
struct Meeting {
  std::atomic<uint64_t> arrived;
  int64_t input[2][kMostMembers][kMostElements];
};

class Device {
 public:
  explicit Device(MPI_Comm world) {
    int rank = 0;
    MPI_Comm_rank(world, &rank);
    MPI_Aint bytes = rank == 0 ? sizeof(Meeting) * kMostGroups : 0;
    void* base = nullptr;
    MPI_Win_allocate_shared(bytes, 1, MPI_INFO_NULL, world, &base, &window_);
    int unit = 0;
    MPI_Win_shared_query(window_, 0, &bytes, &unit, &base);
    meetings_ = static_cast<Meeting*>(base);  // zero: fresh pages
    thread_ = std::thread([this] { run(); });
  }
  // Ends when everything launched is done, or the process must be killed: a device cannot be interrupted.
  void close() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_one();
    thread_.join();
    MPI_Win_free(&window_);
  }
  void launch(size_t group, int member, int size, Batch& batch, Completion& done) {
    {
      const std::lock_guard lock(mutex_);
      launched_.push_back({group, member, size, &batch, &done});
    }
    changed_.notify_one();
  }
  size_t poll() {
    std::vector<Completion*> done;
    {
      const std::lock_guard lock(mutex_);
      done.swap(done_);
    }
    for (Completion* completion : done) completion->complete(nullptr);
    return done.size();
  }
  uint64_t batches() const { return batches_.load(); }

 private:
  struct Launched {
    size_t group;
    int member;
    int size;
    Batch* batch;
    Completion* done;
  };

  void run() {
    std::unique_lock lock(mutex_);
    std::vector<uint64_t> number(kMostGroups, 0);
    while (true) {
      changed_.wait(lock, [&] { return !launched_.empty() || closing_; });
      if (launched_.empty()) return;
      const Launched next = launched_.front();
      launched_.pop_front();
      lock.unlock();
      sum(next, number[next.group]++);
      lock.lock();
      batches_.fetch_add(1);
      done_.push_back(next.done);
    }
  }

  void sum(const Launched& next, uint64_t number) {
    Meeting& meeting = meetings_[next.group];
    auto& place = meeting.input[number % 2];
    const auto all = [&](auto use) {
      size_t at = 0;
      for (const OperationPtr& operation : next.batch->operations) {
        const auto count = static_cast<size_t>(operation->descriptor.count);
        use(*operation, at, count);
        at += count;
      }
    };
    all([&](const Operation& operation, size_t at, size_t count) {
      std::memcpy(&place[next.member][at], operation.inputs.front().data, count * sizeof(int64_t));
    });
    meeting.arrived.fetch_add(1);
    const uint64_t wanted = (number + 1) * static_cast<uint64_t>(next.size);
    while (meeting.arrived.load() < wanted) std::this_thread::yield();
    all([&](const Operation& operation, size_t at, size_t count) {
      std::vector<int64_t> total(count);
      for (int m = 0; m < next.size; ++m)
        for (size_t i = 0; i < count; ++i) total[i] += place[m][at + i];
      std::memcpy(operation.outputs.front().data, total.data(), count * sizeof(int64_t));
    });
  }

  MPI_Win window_ = MPI_WIN_NULL;
  Meeting* meetings_ = nullptr;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Launched> launched_;  // guarded by mutex_
  std::vector<Completion*> done_;  // guarded by mutex_
  bool closing_ = false;           // guarded by mutex_
  std::atomic<uint64_t> batches_{0};
  std::thread thread_;
};

// One group's part of it.
class DeviceDouble final : public DevicePlane {
 public:
  DeviceDouble(Device& device, size_t group, int member, int size)
      : device_(device), group_(group), member_(member), size_(size) {}
  void introduce(int, const Operation&, TableEntry&) override {}
  std::string introduced(int, const std::vector<TableEntry>&) override {
    ready_ = true;
    return {};
  }
  bool ready() const override { return ready_; }
  void launch(Batch& batch, bool, Completion& done) override { device_.launch(group_, member_, size_, batch, done); }
  void abort() override {}

 private:
  Device& device_;
  const size_t group_;
  const int member_;
  const int size_;
  bool ready_ = false;
};

}  // namespace multicomm::tests
