#include "transport/device/group_plane.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "coordinator/received.h"
#include "transport/device/device_operation.h"
#include "transport/device/nccl_calls.h"

namespace multicomm::device {
namespace {

constexpr int kVersionWithGather = 22800;

// Which device it is, among those of all hosts and under whatever number each process knows it.
struct DeviceIdentity {
  uint64_t bits[2];
};

// What a member says of itself, in a TableEntry.
struct Introduction {
  int32_t nccl_version;  // 0: none
  int32_t can_stage;     // 1: through host memory; 3: MPI takes device memory, too
  DeviceIdentity device;
  NcclUniqueId id;   // the lowest member's counts
  char why_not[64];  // of NCCL
};
static_assert(sizeof(Introduction) <= sizeof(TableEntry));

DeviceIdentity identity_of(c10::Device device, uint64_t host) {
  DeviceIdentity identity{};
  if (device.type() == c10::DeviceType::CUDA) {
    using Get = int (*)(int*, int);
    using Uuid = int (*)(void*, int);
    const auto get = reinterpret_cast<Get>(loaded_symbol("libcuda.so", "cuDeviceGet"));
    const auto uuid = reinterpret_cast<Uuid>(loaded_symbol("libcuda.so", "cuDeviceGetUuid_v2"));
    int number = 0;
    if (get != nullptr && uuid != nullptr && get(&number, device.index()) == 0 && uuid(&identity, number) == 0)
      return identity;
  }
  identity.bits[0] = host;
  identity.bits[1] = hash_combine(static_cast<uint64_t>(device.type()), static_cast<uint64_t>(device.index()));
  return identity;
}

// NCCL moves the memory of CUDA devices; another device needs a library of its own with NCCL's interface, by name.
bool nccl_knows(c10::DeviceType type, const Settings& settings) {
  return type == c10::DeviceType::CUDA || !settings.nccl_library.empty();
}

// Ids that nobody was told to use: each has a thread and a socket in NCCL that wait for its members. Driver.
std::vector<NcclUniqueId>& spare_ids() {
  static auto* ids = new std::vector<NcclUniqueId>();
  return *ids;
}

// Of each kind of slowness once per process. Driver.
void warn_once(bool& warned, const std::string& text) {
  if (!std::exchange(warned, true)) std::fprintf(stderr, "multicomm: %s\n", text.c_str());
}
bool warned_of_staging = false, warned_of_reductions = false;

// Two members on one device: their places; the first two in order.
std::optional<std::pair<size_t, size_t>> sharing(const std::vector<Introduction>& all) {
  std::map<std::pair<uint64_t, uint64_t>, size_t> seen;
  for (size_t m = 0; m < all.size(); ++m) {
    const auto [it, fresh] = seen.emplace(std::pair(all[m].device.bits[0], all[m].device.bits[1]), m);
    if (!fresh) return std::pair(it->second, m);
  }
  return std::nullopt;
}

}  // namespace

GroupPlane::GroupPlane(const mpi::GroupDeviceParts& parts, const Settings& settings, Launchers& launchers)
    : parts_(parts), settings_(settings), launchers_(launchers) {}

void GroupPlane::connect(mpi::Messages& messages) {
  staged_ = std::make_unique<StagedPlane>(parts_.staging, parts_.shared->requests, *parts_.shared->types,
                                          parts_.shared->pool, messages, parts_.largest_count, parts_.size,
                                          static_cast<int64_t>(settings_.staging_bytes));
}

void GroupPlane::introduce(int peer, const Operation& first, TableEntry& mine) {
  const c10::Device device = *static_cast<const DeviceOperation&>(first).device;
  if (launcher_ == nullptr) {
    launcher_ = &launchers_.of(device);
    if (settings_.cuda != CudaMode::kStaged && nccl_knows(device.type(), settings_))
      api_ = nccl_api(settings_.nccl_library, no_nccl_);
    else if (settings_.cuda != CudaMode::kStaged)
      no_nccl_ = "NCCL does not know " + c10::DeviceTypeName(device.type(), true) + " devices";
  }
  Introduction own{};
  own.nccl_version = api_ == nullptr ? 0 : api_->version;
  own.can_stage = (staged_->has_communicator() || peer >= 0 ? 1 : 0) | (mpi_takes_device_memory() ? 2 : 0);
  own.device = identity_of(device, parts_.host);
  no_nccl_.copy(own.why_not, sizeof(own.why_not) - 1);
  const bool lowest = peer < 0 ? parts_.rank == 0 : parts_.rank < peer;
  if (api_ != nullptr && lowest) {
    Party& party = party_of(peer);
    if (!party.own_id) {
      NcclUniqueId id{};
      if (!spare_ids().empty()) {
        party.own_id = spare_ids().back();
        spare_ids().pop_back();
      } else if (api_->get_unique_id(&id) == kNcclSuccess) {
        party.own_id = id;
      }
      if (!party.own_id) {
        own.nccl_version = 0;
        std::string("ncclGetUniqueId has failed").copy(own.why_not, sizeof(own.why_not) - 1);
      }
    }
    if (party.own_id) own.id = *party.own_id;
  }
  std::memcpy(mine.text, &own, sizeof(own));
}

std::string GroupPlane::introduced(int peer, const std::vector<TableEntry>& entries) {
  Party& party = party_of(peer);
  if (party.introduced) return {};
  std::vector<Introduction> all(entries.size());
  std::vector<int> ranks(entries.size());
  for (size_t m = 0; m < entries.size(); ++m) {
    std::memcpy(&all[m], entries[m].text, sizeof(Introduction));
    const int member = peer < 0 ? static_cast<int>(m)
                       : m == 0 ? std::min(peer, parts_.rank)
                                : std::max(peer, parts_.rank);
    ranks[m] = parts_.global_ranks[static_cast<size_t>(member)];
  }
  const auto rank_text = [&](size_t m) { return "rank " + std::to_string(ranks[m]); };
  std::string why_not, cannot_stage;
  bool device_memory = true;
  for (size_t m = 0; m < all.size(); ++m) {
    device_memory = device_memory && (all[m].can_stage & 2) != 0;
    if ((all[m].can_stage & 1) == 0 && cannot_stage.empty())
      cannot_stage = rank_text(m) + " had no device when the group was made, so there is no communicator for staging";
    if (!why_not.empty()) continue;
    if (all[m].nccl_version == 0)
      why_not = rank_text(m) + " has no NCCL: " + text_in(all[m].why_not, sizeof(all[m].why_not));
    else if (all[m].nccl_version != all[0].nccl_version)
      why_not = rank_text(0) + " has NCCL " + version_text(all[0].nccl_version) + ", " + rank_text(m) + " has " +
                version_text(all[m].nccl_version);
  }
  const auto shared = sharing(all);
  if (why_not.empty() && shared)
    why_not = "ranks " + std::to_string(ranks[shared->first]) + " and " + std::to_string(ranks[shared->second]) +
              " share one device";
  if (settings_.cuda == CudaMode::kNccl && !why_not.empty())
    return "NCCL cannot serve, and MULTICOMM_CUDA=nccl wants it: " + why_not +
           ". MULTICOMM_CUDA=auto moves the tensors through host memory instead";
  const bool nccl = settings_.cuda != CudaMode::kStaged && why_not.empty();
  if (!nccl && !cannot_stage.empty()) return (why_not.empty() ? "" : why_not + "; ") + cannot_stage;
  const bool lowest = ranks[0] == parts_.global_ranks[static_cast<size_t>(parts_.rank)];
  if (!nccl && settings_.cuda == CudaMode::kAuto && lowest)
    warn_once(warned_of_staging, "tensors on devices are moved through host memory, which is slow: " + why_not +
                                     ". MULTICOMM_CUDA=staged silences this");
  if (peer < 0) staged_->set_takes_device_memory(device_memory);
  if (!nccl && party.own_id) spare_ids().push_back(*party.own_id);
  if (nccl) {
    const int place = peer < 0 ? parts_.rank : parts_.rank < peer ? 0 : 1;
    party.nccl = std::make_shared<NcclCommunicator>(*api_, *launcher_, all[0].id, place, static_cast<int>(all.size()));
    if (aborted_) party.nccl->abort();
  }
  party.introduced = true;
  return {};
}

void GroupPlane::launch(Batch& batch, bool more, Completion& done) {
  const Operation& first = *batch.operations.front();
  const bool message = is_point_to_point(first.descriptor.kind);
  const std::shared_ptr<NcclCommunicator> nccl = party_of(message ? first.peer : -1).nccl;
  if (nccl && nccl_serves(first.descriptor)) {
    ++in_flight_;
    if (message) return launch_message({&batch, &done}, party_of(first.peer));
    together_.push_back({&batch, &done});
  } else {
    if (nccl && settings_.cuda == CudaMode::kAuto && parts_.rank == 0)
      warn_once(warned_of_reductions, "NCCL has no " + std::string(name_of(first.descriptor.reduce_op)) + " of " +
                                          name_of(first.descriptor.dtype) +
                                          ": such tensors are moved through host memory, which is slow");
    staged_->launch(*launcher_, batch, done);
  }
  if (!more && !together_.empty()) launch_together(std::exchange(together_, {}), all_.nccl);
}

void GroupPlane::launch_message(const Flight& flight, Party& party) {
  if (party.latest && party.latest_task == launcher_->posted()) {  // nothing has come in between
    const std::lock_guard lock(party.latest->mutex);
    if (!party.latest->taken) return party.latest->flights.push_back(flight);
  }
  party.latest = std::make_shared<MessageGroup>();
  party.latest->flights.push_back(flight);
  launcher_->post([this, messages = party.latest, nccl = party.nccl] {
    std::vector<Flight> flights;
    {
      const std::lock_guard lock(messages->mutex);
      messages->taken = true;
      flights = messages->flights;
    }
    run(flights, nccl);
  });
  party.latest_task = launcher_->posted();
}

void GroupPlane::launch_together(std::vector<Flight> flights, const std::shared_ptr<NcclCommunicator>& nccl) {
  launcher_->post([this, flights = std::move(flights), nccl] { run(flights, nccl); });
}

// The launcher's. One NCCL group for all of them: the members have agreed on the same batches.
void GroupPlane::run(const std::vector<Flight>& flights, const std::shared_ptr<NcclCommunicator>& nccl) {
  Reports& reports = launcher_->reports();
  const auto tell = [this, &reports](const std::vector<Flight>& all, const std::string& error) {
    reports.add([this, all, error] {
      for (const Flight& flight : all) end(flight, error.empty() ? nullptr : &error);
    });
  };
  try {
    if (nccl->aborted()) throw std::runtime_error("given up before it was launched");
    auto batch = std::make_shared<NcclBatch>();
    for (const Flight& flight : flights) {
      begin(*launcher_, *flight.batch);
      append(*batch, *flight.batch, nccl->rank(), nccl->size(), launcher_->device(),
             api_->version >= kVersionWithGather && api_->gather != nullptr);
    }
    nccl->run(batch->calls);
    for (const auto& copy : batch->after) copy();
    std::shared_ptr<c10::Event> event;
    for (const Flight& flight : flights) event = finish(*launcher_, *flight.batch);
    launcher_->watch(nccl.get(), [nccl] { nccl->look_for_failure(); });
    reports.add([flights] {
      for (const Flight& flight : flights) flight.done->launched();
    });
    launcher_->when_done(std::move(event), [this, flights, nccl, batch, tell](const std::string* error) {
      launcher_->unwatch(nccl.get());
      std::string text = nccl->failure();
      if (text.empty() && error != nullptr) text = *error;
      if (text.empty() && nccl->aborted()) text = "given up while it was on the device";
      tell(flights, text);
    });
  } catch (const std::exception& error) {
    // Of NCCL, or no memory for a copy: this rank's device has no part in it, so its peers' would wait for ever. What
    // it has been given all the same uses the tensors for a while yet.
    after_the_stream(*launcher_, nullptr,
                     [tell, flights, why = std::string(error.what())](const std::string*) { tell(flights, why); });
  }
}

void GroupPlane::end(const Flight& flight, const std::string* error) {
  --in_flight_;
  flight.done->complete(error);
}

void GroupPlane::abort() {
  aborted_ = true;
  if (staged_) staged_->abort();
  if (all_.nccl) all_.nccl->abort();
  for (auto& [peer, party] : pairs_)
    if (party.nccl) party.nccl->abort();
}

void GroupPlane::close() {
  if (all_.nccl) all_.nccl->close();
  for (const auto& [peer, party] : pairs_)
    if (party.nccl) party.nccl->close();
  if (parts_.staging != MPI_COMM_NULL) {
    MPI_Comm staging = parts_.staging;
    MPI_Comm_free(&staging);
  }
}

}  // namespace multicomm::device
