// One group's way of moving the tensors of a device: NCCL where it serves, else staged through the host.
#pragma once

#include <mpi.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/settings.h"
#include "transport/device/launcher.h"
#include "transport/device/nccl_communicator.h"
#include "transport/device/staged_plane.h"
#include "transport/mpi/channel.h"

namespace multicomm::device {

class GroupPlane final : public mpi::GroupDevice {
 public:
  GroupPlane(const mpi::GroupDeviceParts& parts, const Settings& settings, Launchers& launchers);

  void introduce(int peer, const Operation& first, TableEntry& mine) override;
  std::string introduced(int peer, const std::vector<TableEntry>& all) override;
  bool ready() const override { return all_.introduced; }
  void launch(Batch& batch, bool more, Completion& done) override;
  void abort() override;
  bool idle() const override { return in_flight_ == 0 && (!staged_ || staged_->idle()); }
  void connect(mpi::Messages& messages) override;
  void close() override;

 private:
  struct Flight {
    Batch* batch;
    Completion* done;
  };
  // Messages of one pair that follow each other directly in the launch order: one NCCL group, so that both directions
  // of an exchange move at once. The other side need not have the same messages together: the first unfinished one of
  // all in the order is always under way on both its sides, whatever is in the kernel with it.
  struct MessageGroup {
    std::mutex mutex;
    std::vector<Flight> flights;  // guarded by mutex
    bool taken = false;           // guarded by mutex: the launcher is at it
  };
  // Those who move tensors together: all members, or a pair.
  struct Party {
    bool introduced = false;
    std::optional<NcclUniqueId> own_id;
    std::shared_ptr<NcclCommunicator> nccl;  // null: staged
    std::shared_ptr<MessageGroup> latest;    // driver
    uint64_t latest_task = 0;                // driver: the launcher's number of it
  };
  Party& party_of(int peer) { return peer < 0 ? all_ : pairs_[peer]; }
  void launch_message(const Flight& flight, Party& party);
  void launch_together(std::vector<Flight> flights, const std::shared_ptr<NcclCommunicator>& nccl);
  void run(const std::vector<Flight>& flights, const std::shared_ptr<NcclCommunicator>& nccl);
  void end(const Flight& flight, const std::string* error);

  const mpi::GroupDeviceParts parts_;
  const Settings& settings_;
  Launchers& launchers_;
  const NcclApi* api_ = nullptr;
  std::string no_nccl_;  // why not
  std::unique_ptr<StagedPlane> staged_;
  Launcher* launcher_ = nullptr;
  Party all_;
  std::map<int, Party> pairs_;  // by the other one's group rank
  std::vector<Flight> together_;
  bool aborted_ = false;
  int in_flight_ = 0;
};

}  // namespace multicomm::device
