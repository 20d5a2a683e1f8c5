// One NCCL communicator: made when first used, never blocking, given up at any time.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "transport/device/launcher.h"
#include "transport/device/nccl_api.h"

namespace multicomm::device {

// All calls into NCCL come from the launcher's tasks, except abort(). NCCL's own waits (for peers that make the
// communicator, for first connections) are polled for, so that abort() ends them.
class NcclCommunicator : public std::enable_shared_from_this<NcclCommunicator> {
 public:
  NcclCommunicator(const NcclApi& api, Launcher& launcher, const NcclUniqueId& id, int rank, int size)
      : api_(api), launcher_(launcher), id_(id), rank_(rank), size_(size) {}
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // --- the launcher's tasks; they throw std::runtime_error ---
  // Makes the communicator if it does not exist yet: collective over the members, hence part of an ordered batch. Then
  // runs `calls` as one NCCL group and waits until the device has it in its queue.
  using Call = std::function<NcclResult(const NcclApi& api, NcclComm communicator, void* stream)>;
  void run(const std::vector<Call>& calls);
  // While something is on the device: gives the communicator up when NCCL reports that it has failed.
  void look_for_failure();
  // --- any thread ---
  // Ends what is on the device, and what waits; nothing is launched any more. Returns at once.
  void abort();
  bool aborted() const { return aborted_.load(); }
  // Nothing is in flight on any member, nor will be: frees it, bounded, on a thread of its own, since NCCL waits for
  // the other members there. Returns at once.
  void close();
  // What NCCL has said of its failure, or nothing.
  std::string failure() const;
  int rank() const { return rank_; }
  int size() const { return size_; }

 private:
  void ensure();
  void wait_until_ready(const char* what, std::chrono::steady_clock::time_point deadline,
                        const std::function<void()>& meanwhile);
  void finalize();
  void remember(const std::string& failure);
  void check(NcclResult result, const char* what);
  void check_not_aborted() const;
  template <typename Use>
  void exclusively(Use use);

  const NcclApi& api_;
  Launcher& launcher_;
  const NcclUniqueId id_;
  const int rank_;
  const int size_;
  std::atomic<bool> made_{false};

  // Held by the launcher during each call; by abort(), as long as that comes back, so that it frees nothing in use.
  std::timed_mutex calls_;
  std::atomic<NcclComm> communicator_{nullptr};
  NcclComm raw_ = nullptr;  // the launcher's; NCCL may write it after the call that was given its address
  std::atomic<bool> aborted_{false};
  mutable std::mutex failure_mutex_;
  std::string failure_;  // guarded by failure_mutex_
};

}  // namespace multicomm::device
