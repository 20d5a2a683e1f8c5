// A group's batches: planned, brought into the devices' order, launched, ended.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "coordinator/coordinator.h"
#include "coordinator/error_text.h"
#include "coordinator/faults.h"
#include "coordinator/group_state.h"
#include "coordinator/inline_payload.h"
#include "coordinator/received.h"

namespace multicomm {

// All members have submitted what is in the unit, so that the second phase waits for nobody's program: one that came
// first could hold up unrelated groups on a rank that never submits.
void GroupState::start_order() {
  LaunchOrder& order = coordinator_.launch_order();
  my_proposal_ = order.clock();
  order_due_ = false;
  heed_notice();
  if (device_stopped_) {
    // The peers start it, so this rank does; but it has told them that nothing comes of it.
    for (BatchInFlight* flight : std::exchange(unordered_, {})) end(*flight, failure());
  } else {
    ordering_ = propose(std::exchange(unordered_, {}), next_unit_++);
    my_proposal_ = std::get<0>(ordering_->place);
    proposed_ = true;
  }
  order_active_ = true;
  guarded([&] { channel_->control().start_order(my_proposal_, timestamp_, order_done_); });
}

void GroupState::on_order(const std::string* error) {
  order_active_ = false;
  if (error != nullptr) return broken(*error);
  coordinator_.launch_order().learn(timestamp_);
  if (std::exchange(proposed_, false)) decide(ordering_, timestamp_);  // not when the group was given up meanwhile
  follow_up();
  coordinator_.make_ready(*this);
}

GroupState::UnitPlace GroupState::propose(std::vector<BatchInFlight*> flights, uint64_t number) {
  const auto unit = units_.insert(units_.end(), Unit{std::move(flights), {}});
  unit->place = coordinator_.launch_order().propose(identity(), number, [this, unit] { launch_unit(unit); });
  return unit;
}

void GroupState::decide(UnitPlace unit, uint64_t timestamp) {
  const LaunchOrder::Place proposed = unit->place;
  std::get<0>(unit->place) = timestamp;  // first: the unit may be launched, and gone
  coordinator_.launch_order().decide(proposed, timestamp);
}

void GroupState::launch_unit(UnitPlace unit) {
  const auto flights = std::move(unit->flights);
  units_.erase(unit);
  for (BatchInFlight* flight : flights) launch(*flight, flight != flights.back());
}

// The records tell whoever submits another collective. Whoever waits for a message, or whose device waits in a batch,
// enters no round: without this it would wait for ever for a member that has given the group up.
void GroupState::tell_peers() {
  InquiryPlane* plane = coordinator_.inquiries();
  if (!channel_ || plane == nullptr || std::exchange(peers_told_, true)) return;
  const int self = info_.ranks[static_cast<size_t>(info_.rank)];
  Notice notice{identity(), self, {}};
  const ErrorPtr error = failure();
  const std::string& why = error->cause.empty() ? error->message : error->cause;
  why.copy(notice.why, sizeof(notice.why) - 1);
  for (const int rank : info_.ranks)
    if (rank != self) plane->tell(rank, notice);
}

void GroupState::told(const Notice& notice) {
  if (given_up_by_ >= 0) return;
  given_up_by_ = notice.by;
  given_up_why_ = text_in(notice.why, sizeof(notice.why));
  given_up_since_ = coordinator_.checked_at();
}

// A device that is given something now would wait in it for whoever has given the group up.
void GroupState::heed_notice() {
  if (given_up_by_ < 0 || device_stopped_) return;
  give_up(peer_failed_error(info_, given_up_by_, given_up_why_));
  announce_failure_ = false;  // whoever told us has told everybody
}

// Takes out what is not launched and never will be: other groups' devices would wait for its turn.
void GroupState::drop_unlaunched() {
  proposed_ = false;
  std::vector<LaunchOrder::Place> places;
  for (const Unit& unit : std::exchange(units_, {})) {
    places.push_back(unit.place);
    for (BatchInFlight* flight : unit.flights) strand(*flight);
  }
  for (BatchInFlight* flight : std::exchange(unordered_, {})) strand(*flight);
  coordinator_.launch_order().withdraw(places);
}

// The transport is broken: nothing more is started on it, whatever the last round asks for.
void GroupState::stop_following_up() {
  order_due_ = false;
  table_ = Table::kNone;
  drop_unlaunched();
}

// What is launched would keep the device until its peers come, and what is not will not be.
void GroupState::stop_device() {
  device_stopped_ = true;
  drop_unlaunched();  // where a second phase is due for it, that is due all the same
  for (const BatchInFlight& flight : batches_)
    if (flight.batch.descriptor().device != DeviceKind::kCpu) device_given_up_.store(true);
  if (channel_ && channel_->device() != nullptr) channel_->device()->abort();
}

// Completes the leading operations whose data rode in the record; returns how many they are.
size_t GroupState::finish_inline(std::span<const OperationPtr> operations) {
  InlineLayout layout(static_cast<uint32_t>(info_.size()));
  size_t count = 0;
  for (const OperationPtr& operation : operations) {
    const auto slot = layout.place(operation->descriptor);
    if (!slot) break;
    if (!operation->abandoned) unpack_inline(*operation, info_.rank, info_.size(), result_.payload + slot->offset);
    settle(operation, nullptr);
    ++count;
  }
  return count;
}

void GroupState::launch_batches(const std::vector<OperationPtr>& operations) {
  if (operations.empty()) return;
  const Settings& settings = coordinator_.settings();
  FusionLimits limits{!settings.deterministic, settings.fusion_operation_bytes, settings.fusion_buffer_bytes};
  if (fault(Fault::kPlansFromLocalState)) limits.fuse = pending_.empty();
  auto batches = plan_batches(operations, limits);
  const bool backwards = fault(Fault::kStartsOutOfOrder) && !pending_.empty();
  {
    const std::lock_guard lock(queue_mutex_);
    statistics_.batches += batches.size();
  }
  for (Batch& batch : batches) batch.number = next_batch_++;
  if (backwards) std::reverse(batches.begin(), batches.end());
  for (Batch& batch : batches) {
    BatchInFlight& flight = new_flight(std::move(batch));
    const bool on_device = flight.batch.descriptor().device != DeviceKind::kCpu;
    if (on_device && settings.strict_order && !fault(Fault::kNoSecondPhase)) {
      unordered_.push_back(&flight);
      order_due_ = true;
    } else if (on_device && device_stopped_) {
      end(flight, failure());
    } else {
      launch(flight);
    }
  }
}

GroupState::BatchInFlight& GroupState::new_flight(Batch batch) {
  BatchInFlight& flight = batches_.emplace_back();
  flight.group = this;
  flight.batch = std::move(batch);
  flight.self = std::prev(batches_.end());
  return flight;
}

void GroupState::launch(BatchInFlight& flight, bool more) {
  if (broken_) return strand(flight);
  trace_.launching(flight.batch);
  guarded([&] {
    for (const OperationPtr& operation : flight.batch.operations)
      if (!operation->prepared) operation->prepare();  // stands in for one of this rank's
    if (flight.batch.descriptor().device == DeviceKind::kCpu) return channel_->data().launch(flight.batch, flight);
    if (channel_->device() == nullptr) throw std::runtime_error("this group moves no device tensors");
    channel_->device()->launch(flight.batch, more, flight);
  });
  trace_.packed(flight.batch);
}

void GroupState::on_launched(BatchInFlight& flight) {
  trace_.launched(flight.batch);
  for (const OperationPtr& operation : flight.batch.operations)
    if (!operation->abandoned) coordinator_.launched(operation);
}

void GroupState::on_batch(BatchInFlight& flight, const std::string* error) {
  if (error == nullptr || device_stopped_) {
    end(flight, error == nullptr ? nullptr : broken_error(info_, *error));
  } else {
    strand(flight);
    broken(*error);
  }
  if (all_left_) coordinator_.make_ready(*this);
}

// Ends the batch with the error that the group is about to be given up with, or has been.
void GroupState::strand(BatchInFlight& flight) {
  if (const ErrorPtr error = failure()) return end(flight, error);
  stranded_.insert(stranded_.end(), flight.batch.operations.begin(), flight.batch.operations.end());
  batches_.erase(flight.self);
}

void GroupState::end(BatchInFlight& flight, const ErrorPtr& error) {
  trace_.batch_over(flight.batch, error);
  const auto operations = std::move(flight.batch.operations);
  batches_.erase(flight.self);  // `flight` is gone from here on
  for (const OperationPtr& operation : operations) settle(operation, error);
  if (all_joined_ && batches_.empty()) end_join();
}

}  // namespace multicomm
