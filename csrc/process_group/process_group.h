// The c10d face: checks arguments, turns a call into operations, hands them to the coordinator. No MPI here.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "process_group/arguments.h"
#include "process_group/handle.h"
#include "process_group/runtime.h"
#include "process_group/work.h"

namespace multicomm {

struct MulticommOptions final : c10d::Backend::Options {
  explicit MulticommOptions(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : Options("multicomm", timeout) {}
  MulticommOptions(const MulticommOptions&) = default;
};

// What the creator knows of the group and of the default world.
struct GroupDescription {
  c10::intrusive_ptr<c10d::Store> store;
  int rank;  // in group order
  int size;
  std::vector<int> global_ranks;  // in group order
  int world_rank;
  int world_size;
  std::string name;
  std::string server_executable;
};

// Of a verb's call, where it has a meaning.
struct VerbOptions {
  ReduceOp op = ReduceOp::kNone;
  double before = 1, after = 1;  // factors of the input and of the result
  const char* name = nullptr;    // of a grouped call: its members are NAME.0, NAME.1, ...
  bool grouped = false;
  bool in_place = false;
};

// Thread-safe, as far as c10d orders the collectives of one group.
class ProcessGroupMulticomm final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  ProcessGroupMulticomm(const GroupDescription& description, const c10::intrusive_ptr<MulticommOptions>& options);
  ~ProcessGroupMulticomm() override;

  const std::string getBackendName() const override { return "multicomm"; }
  // A copy: torch writes the new group's time-out and name into the parent's options when it splits.
  c10::intrusive_ptr<Options> getBackendOptions() override;
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  bool supportsShrinking() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  // Counts at once, also for operations that wait already, unless they have a time-out of their own.
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}  // counted from 0 on every rank
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  // This rank has no more to submit: until every member has called it, the rank takes part in what the others do, with
  // elements that change nothing. The Work's source rank is then the last one to come, in group order.
  WorkPtr join();
  // As all_reduce (SUM), all_gather_into_tensor and all_to_all_single, but matched by name.
  WorkPtr named_all_reduce(const at::Tensor& tensor, const std::string& name);
  WorkPtr named_all_gather(const at::Tensor& output, const at::Tensor& input, const std::string& name);
  WorkPtr named_all_to_all(const at::Tensor& output, const at::Tensor& input, const std::string& name);
  // A number for each call that is made of several operations, of which all members make the same in the same order.
  uint64_t next_composed() { return group_->take_number(); }
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // A barrier whose group rank 0 names who does not come within the time-out: the first of them, or all. The others
  // get the same names from it. The group stays usable; whoever comes late is told so by its own time-out.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  // New groups of some of this one's members (group ranks), or of processes that meet in `store`. Only the members of
  // the new group take part; null for others.
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) override;
  c10::intrusive_ptr<Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                                     const c10::intrusive_ptr<Options>& opts_override) override;
  c10::intrusive_ptr<Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                    const c10::intrusive_ptr<Options>& opts, const int& rank, const int& size) override;
  // `hook` runs on a completion thread, once per Work, also for those that fail.
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  void enableCollectivesTiming() override { timing_.store(true); }

  // The package's own verbs (verbs.cpp): no options, no Work. Tensors of any layout; those of one call are submitted
  // together. `name`: null for none. Root ranks are global ranks.
  using HandlePtr = std::shared_ptr<Handle>;
  HandlePtr verb_all_reduce(const Tensors& tensors, const VerbOptions& options);
  HandlePtr verb_reduce_scatter(const Tensors& tensors, const VerbOptions& options);
  HandlePtr verb_broadcast(const Tensors& tensors, int root, const VerbOptions& options);
  HandlePtr verb_all_gather(const Tensors& tensors, const VerbOptions& options);
  HandlePtr verb_all_to_all(const at::Tensor& tensor, const std::vector<int64_t>& splits, const VerbOptions& options);
  HandlePtr verb_barrier();

  GroupPtr group() const { return group_; }
  const GroupDescription& description() const { return description_; }

 private:
  using TensorOperationPtr = std::shared_ptr<TensorOperation>;
  struct Call {
    c10d::OpType type;
    const char* title;
    std::chrono::milliseconds timeout;
    bool async;
  };

  TensorOperationPtr make(OpKind kind, ReduceOp op, at::ScalarType dtype, int64_t root = -1) const;
  TensorOperationPtr make_all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) const;
  TensorOperationPtr make_all_gather(const Tensors& outputs, const at::Tensor& input) const;
  TensorOperationPtr make_all_gather_into(const at::Tensor& output, const at::Tensor& input) const;
  TensorOperationPtr make_all_to_all(const at::Tensor& output, const at::Tensor& input,
                                     const std::vector<int64_t>& output_splits,
                                     const std::vector<int64_t>& input_splits) const;
  TensorOperationPtr make_reduce_scatter(const at::Tensor& output, const Tensors& inputs,
                                         const c10d::ReduceOp& op) const;
  TensorOperationPtr make_reduce_scatter_from(const at::Tensor& output, const at::Tensor& input,
                                              const c10d::ReduceOp& op) const;
  Where at(const char* operation) const { return {group_->info(), operation}; }
  void check_tag(const char* operation, int tag) const;
  void report_missing(const Where& where, const at::Tensor& missing, std::chrono::milliseconds timeout) const;
  void check_device(const TensorOperation& operation, const char* title);
  void follow_streams(const std::vector<TensorOperationPtr>& operations);
  void observe(WorkState& state, const Call& call, const std::vector<TensorOperationPtr>& operations);
  TensorOperationPtr message(OpKind kind, const at::Tensor& tensor, int peer, int tag);
  void finish_in_time(const TensorOperationPtr& operation, Operation::Clock::time_point deadline);
  c10::intrusive_ptr<Backend> derive(const c10::intrusive_ptr<c10d::Store>& store, std::vector<int> global_ranks,
                                     int rank, const std::string& name, const c10::intrusive_ptr<Options>& opts) const;
  void leave(std::chrono::milliseconds bound);
  WorkPtr receive(Tensors& tensors, int source, int tag, c10d::OpType type);
  WorkPtr submit(const Call& call, std::vector<TensorOperationPtr> operations, const Tensors& inputs, Tensors outputs);
  WorkPtr submit(const Call& call, TensorOperationPtr operation, const Tensors& inputs, Tensors outputs) {
    return submit(call, std::vector<TensorOperationPtr>{std::move(operation)}, inputs, std::move(outputs));
  }
  int global_rank(int64_t rank) const;
  int group_rank(const Where& where, int root) const;
  // What every way of submitting has in common.
  void admit(const std::vector<TensorOperationPtr>& operations, const char* title, std::chrono::milliseconds timeout);
  void release(const std::vector<TensorOperationPtr>& operations, bool wake);
  HandlePtr submit_verb(const char* title, Handle::Form form, std::vector<TensorOperationPtr> operations,
                        const VerbOptions& options, at::Tensor second = {});
  std::vector<int64_t> sizes_of_members(const at::Tensor& own, bool from_each, const VerbOptions& options);

  // Works whose hook has not run yet. Outlives the group: a hook may come after it.
  struct Pending {
    std::mutex mutex;
    std::condition_variable none;
    int64_t count = 0;  // guarded by mutex
  };

  const GroupDescription description_;
  const c10::intrusive_ptr<MulticommOptions> options_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<bool> timing_{false};
  std::atomic<bool> described_{false};  // to the timeline
  std::atomic<int> monitored_barriers_{0};
  std::atomic<int> device_{-1};  // index of the one that its tensors are on; -1: none yet
  using Hook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;
  std::shared_ptr<const Hook> hook_;  // set before the first operation
  const std::shared_ptr<Pending> pending_ = std::make_shared<Pending>();
  GroupPtr group_;
  std::mutex mutex_;
  bool shut_down_ = false;                     // guarded by mutex_
  bool coalescing_ = false;                    // guarded by mutex_
  std::vector<TensorOperationPtr> coalesced_;  // guarded by mutex_
  Tensors coalesced_outputs_;                  // guarded by mutex_
};

}  // namespace multicomm
