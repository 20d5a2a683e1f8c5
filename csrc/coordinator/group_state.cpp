#include "coordinator/group_state.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "coordinator/coordinator.h"
#include "coordinator/error_text.h"
#include "coordinator/faults.h"
#include "coordinator/inline_payload.h"
#include "coordinator/rank_report.h"
#include "coordinator/received.h"
#include "coordinator/stand_in.h"

namespace multicomm {
namespace {

constexpr std::chrono::milliseconds kMakersWord{1000};
constexpr std::chrono::microseconds kShortestRest{20}, kLongestRest{4000};
constexpr std::chrono::seconds kWordOfDeath{3};  // how long a broken transport waits to hear whose death it was

bool is_join(const OperationPtr& operation) { return operation->descriptor.kind == OpKind::kJoin; }

Operation::Clock::time_point after(Operation::Clock::time_point time, Operation::Clock::duration wait) {
  return Operation::Clock::time_point::max() - time < wait ? Operation::Clock::time_point::max() : time + wait;
}

}  // namespace

GroupState::GroupState(Coordinator& coordinator, GroupInfo info)
    : coordinator_(coordinator), info_(std::move(info)), number_(coordinator.next_group()), trace_(coordinator, *this) {
  round_done_.group = this;
  table_done_.group = this;
  order_done_.group = this;
}

std::string GroupState::describe() const { return group_text(info_); }

GroupState::Refused GroupState::enqueue(std::span<const OperationPtr> operations) {
  Refused refused;
  const std::lock_guard lock(queue_mutex_);
  for (const OperationPtr& operation : operations)
    if (ErrorPtr error = take(operation)) refused.emplace_back(operation, std::move(error));
  return refused;
}

// Under the queue's lock.
ErrorPtr GroupState::take(const OperationPtr& operation) {
  if (failure_) return failure_;
  if (const auto lost = coordinator_.memory().enter(*operation)) return lost_memory_error(info_, *operation, *lost);
  if (is_point_to_point(operation->descriptor.kind)) {
    operation->sequence = next_message_++;
    ++statistics_.point_to_point;
  } else {
    // Ranks submit named operations in orders of their own, which must not move the numbers of the others.
    operation->sequence = operation->name.empty() ? next_sequence_.fetch_add(1) : next_named_++;
    ++statistics_.operations;
  }
  statistics_.bytes += static_cast<uint64_t>(operation->bytes());
  queue_.push_back(operation);
  unfinished_.fetch_add(1);
  return nullptr;
}

uint64_t GroupState::take_number() {
  const std::lock_guard lock(queue_mutex_);
  return next_sequence_++;
}

GroupStatistics GroupState::statistics() const {
  const std::lock_guard lock(queue_mutex_);
  return statistics_;
}

ErrorPtr GroupState::failure() const {
  const std::lock_guard lock(queue_mutex_);
  return failure_;
}

void GroupState::connect(std::shared_ptr<Channel> channel) {
  channel_ = std::move(channel);
  channel_->set_sink(this);
  if (const Notice* notice = coordinator_.notice_of(identity())) told(*notice);
  coordinator_.make_ready(*this);
}

std::shared_ptr<Channel> GroupState::release_channel() {
  if (channel_) channel_->set_sink(nullptr);  // here, on the driver: whoever frees it must not touch what we poll
  return std::exchange(channel_, nullptr);
}

void GroupState::take_submissions() {
  {
    const std::lock_guard lock(queue_mutex_);
    taken_.swap(queue_);
  }
  for (OperationPtr& operation : taken_) {
    if (is_point_to_point(operation->descriptor.kind)) messages_.push_back(std::move(operation));
    else if (operation->name.empty() || joining()) pending_.push_back(std::move(operation));  // behind the join
    else wait_by_name(operation);
  }
  taken_.clear();
}

void GroupState::wait_by_name(const OperationPtr& operation) {
  if (!names_.add(operation)) settle(operation, name_clash_error(info_, *operation));
}

void GroupState::advance() {
  take_submissions();
  if (const ErrorPtr error = failure()) fail_pending(error);  // submitted while the group was given up
  waits_for_memory_ = false;
  if ((announce_failure_ || broken_) && failure()) tell_peers();
  if (all_left_) return close_if_over();  // here, and not where the transport reports an end: it is still at work there
  if (!channel_ || broken_) return;
  guarded([&] {
    post_point_to_point();
    if (!round_busy()) start_round();
  });
  if (preparation_failed_) give_up(std::exchange(preparation_failed_, nullptr));
}

// A transport that refuses to start something breaks this group, not the process.
template <typename Start>
void GroupState::guarded(Start start) {
  try {
    start();
  } catch (const std::runtime_error& error) {
    broken(error.what());
  } catch (const std::bad_alloc&) {
    broken("no memory for a buffer");
  }
}

// Makes the operation's segments usable. False while something submitted before it is in the way of its memory.
bool GroupState::enter(const OperationPtr& operation) {
  if (operation->prepared) return true;
  if (!coordinator_.memory().clear(*operation)) {
    if (!std::exchange(waits_for_memory_, true)) coordinator_.wait_for_memory(*this);
    return false;
  }
  try {
    if (operation->descriptor.device == DeviceKind::kCpu) operation->prepare();
  } catch (const std::exception& error) {  // no memory for the staged copy: this rank cannot take part
    preparation_failed_ = cannot_prepare_error(info_, *operation, error.what());
    return false;
  }
  operation->prepared = true;
  return true;
}

void GroupState::post_point_to_point() {
  while (!messages_.empty() && enter(messages_.front())) {
    OperationPtr operation = std::move(messages_.front());
    messages_.pop_front();
    posted_messages_.push_back(operation);
    trace_.posted(*operation);
    channel_->data().post(operation);
  }
}

void GroupState::point_to_point_done(const OperationPtr& operation, const ErrorPtr& error) {
  // Between devices, in the last step of its handshake: whoever has it in the launch order or on the device ends it.
  for (const BatchInFlight& flight : batches_)
    if (error && flight.batch.operations.front() == operation) return broken(error->message);
  const auto it = std::find(posted_messages_.begin(), posted_messages_.end(), operation);
  if (it != posted_messages_.end()) {
    std::swap(*it, posted_messages_.back());
    posted_messages_.pop_back();
  }
  settle(operation, error ? message_error(info_, *operation, *error) : nullptr);
  if (all_left_) coordinator_.make_ready(*this);
}

uint64_t GroupState::message_matched(const OperationPtr& operation, uint64_t number) {
  heed_notice();
  trace_.matched(*operation);
  std::erase(posted_messages_, operation);
  BatchInFlight& flight = new_flight({0, {operation}});
  if (!coordinator_.settings().strict_order || device_stopped_ || broken_) return 0;  // see message_ordered()
  return std::get<0>(propose({&flight}, number)->place);
}

void GroupState::message_ordered(OperationPtr operation, uint64_t timestamp) {
  coordinator_.launch_order().learn(timestamp);
  const auto is_this = [&](const BatchInFlight* flight) { return flight->batch.operations.front() == operation; };
  for (auto unit = units_.begin(); unit != units_.end(); ++unit)
    if (unit->flights.size() == 1 && is_this(unit->flights.front())) return decide(unit, timestamp);
  for (BatchInFlight& flight : batches_) {
    if (!is_this(&flight)) continue;
    if (device_stopped_) return end(flight, failure());
    return launch(flight);  // in relaxed order
  }
  coordinator_.let_go(std::move(operation));  // dropped when the group was given up: maybe the last reference to it
}

void GroupState::withdraw(const OperationPtr& operation) {
  take_submissions();
  if (operation->done()) return;
  const ErrorPtr error = withdrawn_error(info_, *operation);
  const auto it = std::find(messages_.begin(), messages_.end(), operation);
  if (it == messages_.end()) return abandon(operation, error);
  messages_.erase(it);
  settle(operation, error);
}

bool GroupState::joining() const { return std::any_of(pending_.begin(), pending_.end(), is_join); }

bool GroupState::joined() const { return !pending_.empty() && is_join(pending_.front()) && names_.empty(); }

bool GroupState::waits_for(uint64_t name) const {
  if (name == kJoinName) return joining();
  return names_.waits_for(name) ||
         std::any_of(moved_.begin(), moved_.end(), [&](const auto& match) { return match.hash == name; });
}

// Returns how much is offered.
uint64_t GroupState::fill_record() {
  mine_.group_size = static_cast<uint32_t>(info_.size());
  mine_.leaving = leaving_ ? 1 : 0;
  const auto self = static_cast<uint32_t>(info_.ranks[static_cast<size_t>(info_.rank)]);
  mine_.lowest_leaving = leaving_ ? self : kNobody;
  mine_.lowest_failed = announce_failure_ ? self : kNobody;
  mine_.clock = coordinator_.launch_order().clock();
  mine_.sequence = 0;
  mine_.newest_join = 0;
  mine_.newest_joiner = 0;
  mine_.offered = mine_.agreed = 0;
  mine_.active = joined() ? 0 : 1;
  if (joined()) {
    Operation& join = *pending_.front();
    if (!std::exchange(join.prepared, true)) join_allowance_ = join.deadline - join.submitted;
    mine_.newest_join = join.joined_at;
    mine_.newest_joiner = static_cast<uint32_t>(info_.rank);
    mine_.sequence = join.sequence;
    NamedOperations::fill_joined(mine_.names);
    return 1;
  }
  offer_pending();
  names_.fill(mine_.names, [this](const OperationPtr& operation) { return enter(operation); });
  return mine_.offered + mine_.names.submitted.size() + mine_.names.fresh_count;
}

// Whether all members take both for one run, wherever they stand side by side: their sums of checksums are 0.
bool GroupState::same_run(const Descriptor& a, const Descriptor& b) {
  return a.agrees_with(b) && a.root < 0 && a.kind != OpKind::kAllToAll;
}

void GroupState::offer_pending() {
  uint32_t offered = 0, runs = 0;
  InlineLayout layout(mine_.group_size);
  for (const OperationPtr& operation : pending_) {
    const Descriptor& descriptor = operation->descriptor;
    if (offered == kMaxOffered || is_join(operation) || operation->hopeless() || !enter(operation)) break;
    // Of those that came by name each is compared by itself.
    const bool joins = offered > moved_.size() && same_run(mine_.descriptors[runs - 1], descriptor);
    if (!joins && runs == kMaxDescriptors) break;
    if (const auto slot = layout.place(descriptor)) {
      std::memset(mine_.payload + slot->offset, 0, slot->bytes);
      pack_inline(*operation, info_.rank, mine_.payload + slot->offset);
    } else if (coordinator_.settings().deterministic && layout.eligible(descriptor)) {
      break;  // inline or not must be a function of the size alone: it waits for a record with room
    }
    ++offered;
    if (joins) {
      ++mine_.repeats[runs - 1];
      continue;
    }
    mine_.repeats[runs] = 1;
    Descriptor& mine = mine_.descriptors[runs++];
    mine = descriptor;
    // The sum over all is 0: one that comes again before its time never fits, and a root must be there (see on_round).
    if (operation->repeated || descriptor.root == info_.rank) ++mine.checksum;
  }
  mine_.offered = mine_.agreed = offered;
}

// Never offered, on any member: what they build on has failed, for all of them.
void GroupState::drop_hopeless() {
  const auto settle_hopeless = [this](const OperationPtr& operation) { settle(operation, operation->hopeless()); };
  for (const OperationPtr& operation : names_.take_hopeless()) settle_hopeless(operation);
  while (!pending_.empty() && pending_.front()->hopeless()) {
    const OperationPtr operation = std::move(pending_.front());
    pending_.pop_front();
    settle_hopeless(operation);
  }
}

void GroupState::start_round() {
  drop_hopeless();
  const bool announces = leaving_ || announce_failure_;
  if (pending_.empty() && names_.empty() && !announces) return;  // an idle group sends nothing
  if (all_joined_ && !announces) return;
  const uint64_t offer = fill_record();
  if (offer == 0 && !announces) return;
  if (no_progress_ && offer <= last_offer_ && !announces && !joined() && coordinator_.step_time() < round_due_) {
    if (resting_until_ <= coordinator_.step_time()) coordinator_.look_again(*this, resting_until_ = round_due_);
    return;
  }
  last_offer_ = offer;
  if (!no_progress_) waiting_since_ = coordinator_.step_time();
  round_active_ = true;
  trace_.round_started(pending_, mine_.offered, names_);
  channel_->control().start_round(mine_, result_, round_done_);
}

void GroupState::on_round(const std::string* error) {
  round_active_ = false;
  if (error != nullptr) return broken(*error);
  if (const char* what = implausible(mine_, result_)) return broken(std::string("a round came back with ") + what);
  coordinator_.launch_order().learn(result_.clock);
  if (result_.active == 0) {
    trace_.round_over({}, 0);
    all_joined();
  } else {
    if (joined()) pending_.front()->deadline = after(coordinator_.step_time(), join_allowance_);
    // Taken out first: a launch that fails gives the group up, which clears what is pending.
    std::vector<OperationPtr> operations = take_covered(covered_prefix());
    const size_t covered = operations.size();
    const std::vector<OperationPtr> by_name = take_names();
    operations.insert(operations.end(), by_name.begin(), by_name.end());
    trace_.round_over(operations, static_cast<uint32_t>(last_offer_));
    mine_.offered = table_ == Table::kNone ? 0 : 1;  // what of the offer the round still asks for
    mine_.names = {};
    const size_t inlined =
        finish_inline({operations.begin(), operations.begin() + static_cast<std::ptrdiff_t>(covered)});
    operations.erase(operations.begin(), operations.begin() + static_cast<std::ptrdiff_t>(inlined));
    pace_rounds(covered > 0 || table_ != Table::kNone || learned_ || !by_name.empty() || !moved_.empty());
    {
      const std::lock_guard lock(queue_mutex_);
      ++statistics_.rounds;
      statistics_.inline_operations += inlined;
      statistics_.batched_operations += operations.size();
    }
    launch_batches(operations);
    follow_up();
  }
  react_to_members();
  coordinator_.make_ready(*this);
}

// How many of the operations that were offered are settled by this round; sets what the one behind them asks for.
uint32_t GroupState::covered_prefix() {
  const bool all_bring = result_.active == static_cast<uint32_t>(info_.size());
  uint32_t fitting = result_.agreed, plain = kMaxOffered;
  Table before = Table::kNone;  // what is still to be exchanged before the first that is not plain
  for_runs(result_, result_.agreed, [&](uint32_t first, uint32_t, const Descriptor& d) {
    const bool fits = d.checksum == (d.root >= 0 ? 1u : 0u) && (all_bring || joinable(d));
    if (!fits) fitting = std::min(fitting, first);
    const Table asks = introduction_due(d)                 ? Table::kDevices
                       : d.kind == OpKind::kGatherVariable ? Table::kSizes
                                                           : Table::kNone;
    if (asks == Table::kNone || first >= plain) return;
    plain = first;
    before = asks;
  });
  if (fault(Fault::kNoValidation)) fitting = result_.offered;
  // An operation before which something is still to be exchanged ends the prefix; at its head, it has the round for
  // itself.
  const bool asks = plain < fitting;
  asks_next_ = asks && std::min(fitting, plain) > 0;
  const uint32_t covered = std::min(fitting, plain);
  table_ = asks                        ? (covered > 0 ? Table::kNone : before)
           : fitting < result_.offered ? Table::kDisagreement
                                       : Table::kNone;
  stand_in_ = as_joined() && table_ == Table::kSizes ? stand_in_for(result_.descriptors[0]) : nullptr;
  return covered;
}

OperationPtr GroupState::stand_in_for(const Descriptor& descriptor) const {
  auto operation = std::make_shared<StandIn>(descriptor, info_.size());
  operation->contributors = static_cast<int>(result_.active);
  return operation;
}

// The operations of the covered prefix; where this rank has joined, what stands in for its own.
std::vector<OperationPtr> GroupState::take_covered(uint32_t count) {
  const bool from_others = as_joined();
  std::vector<OperationPtr> operations;
  operations.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    if (from_others) {
      operations.push_back(stand_in_for(descriptor_at(result_, i)));
    } else {
      pending_.front()->contributors = static_cast<int>(result_.active);
      operations.push_back(std::move(pending_.front()));
      pending_.pop_front();
    }
    if (moved_.empty()) continue;
    Descriptor own = operations.back()->descriptor;
    if (from_others) own.checksum = 0;
    // Inline or not must then be a function of the size alone, and only what is compared rides in the record.
    const bool compared_again = coordinator_.settings().deterministic && InlineLayout(mine_.group_size).eligible(own);
    if (!compared_again) names_.agreed(moved_.front(), own);
    moved_.pop_front();
  }
  return operations;
}

// What is waiting everywhere under a name: returns what is agreed on. The rest goes to the front of what is still to be
// compared: a place that all members' queues have.
std::vector<OperationPtr> GroupState::take_names() {
  NamedOperations::Matches matches;
  // Else the head of what is pending is asked about, or is to be in the next round, which nothing may put off for ever.
  if (table_ == Table::kNone && !asks_next_) {
    matches = names_.match(result_.names, result_.active < static_cast<uint32_t>(info_.size()));
    std::vector<OperationPtr> fresh;
    for (const auto& match : matches.submitted)
      if (match.operation) fresh.push_back(match.operation);
    pending_.insert(pending_.begin(), fresh.begin(), fresh.end());
    for (auto it = matches.submitted.rbegin(); it != matches.submitted.rend(); ++it)
      moved_.push_front({it->slot, it->hash, nullptr});
  }
  learned_ = names_.learn(result_.names);
  return std::move(matches.agreed);
}

// Members that wait for each other's names would ask without end whether there are any: without progress and without
// anything new, the next round waits a moment, in proportion to the wait so far.
void GroupState::pace_rounds(bool progress) {
  const auto now = coordinator_.step_time();
  no_progress_ = !progress;
  round_due_ = now + std::clamp<Operation::Clock::duration>((now - waiting_since_) / 8, kShortestRest, kLongestRest);
}

void GroupState::all_joined() {
  if (!joined()) return;  // given up meanwhile
  all_joined_ = true;
  pending_.front()->peer = static_cast<int>(result_.newest_joiner);
  // Ranks that joined early have submitted less: from here on all count alike.
  const uint64_t missed = result_.sequence - pending_.front()->sequence;
  const auto catch_up = [&](const auto& operations) {
    for (const OperationPtr& operation : operations)
      if (operation->name.empty() && !is_point_to_point(operation->descriptor.kind)) operation->sequence += missed;
  };
  catch_up(pending_);
  {
    const std::lock_guard lock(queue_mutex_);
    catch_up(queue_);
    next_sequence_ += missed;
  }
  if (batches_.empty()) end_join();
}

// Not before what this rank takes part in is over: nobody would drive it.
void GroupState::end_join() {
  all_joined_ = false;
  const OperationPtr join = std::move(pending_.front());
  pending_.pop_front();
  const auto next_join = std::find_if(pending_.begin(), pending_.end(), is_join);
  const std::vector<OperationPtr> later(pending_.begin(), next_join);
  pending_.erase(pending_.begin(), next_join);
  auto place = pending_.begin();
  for (const OperationPtr& operation : later) {
    if (operation->name.empty()) place = std::next(pending_.insert(place, operation));
    else wait_by_name(operation);
  }
  settle(join, nullptr);
  coordinator_.make_ready(*this);
}

OperationPtr GroupState::take_asked_about() {
  if (!moved_.empty()) moved_.pop_front();
  if (stand_in_) return std::exchange(stand_in_, nullptr);
  if (as_joined()) return nullptr;
  OperationPtr operation = std::move(pending_.front());
  pending_.pop_front();
  return operation;
}

// Every member has read the same result, so every member starts the same here, before any further round. The next round
// does not wait for the end of the second phase, only for its start: whoever just missed a round of a busy group would
// else wait for three collectives. A second phase waits for the end of the one before, and holds back what comes after
// it; so all members start the same in the same order, whichever ends first.
void GroupState::follow_up() {
  if (broken_) return stop_following_up();
  if (order_due_ && order_active_) return;  // on_order() comes back here
  if (order_due_) start_order();
  if (broken_ || round_active_) return;
  if (table_ == Table::kDisagreement) start_table(text_for_others());
  if (table_ == Table::kSizes)
    start_table(std::to_string(asked_about()->piece_size()) + ' ' +
                std::to_string(asked_about()->inputs.front().count));
  if (table_ == Table::kDevices) {
    my_entry_ = {};
    guarded([&] { channel_->device()->introduce(-1, *pending_.front(), my_entry_); });
    if (!broken_) start_table();
  }
}

std::string GroupState::text_for_others() const {
  if (as_joined()) return std::string(kJoined) + ", so that it takes part in nothing that needs every rank's own data";
  const Operation& operation = *pending_.front();
  return operation.describe() + (operation.repeated ? ", again, while the one before it had not begun" : "");
}

bool GroupState::introduction_due(const Descriptor& descriptor) const {
  return descriptor.device != DeviceKind::kCpu && channel_->device() != nullptr && !channel_->device()->ready();
}

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
size_t GroupState::finish_inline(const std::vector<OperationPtr>& operations) {
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

void GroupState::start_table(const std::string& mine) {
  my_entry_ = {};
  std::memcpy(my_entry_.text, mine.data(), std::min(mine.size(), sizeof(my_entry_.text) - 1));
  start_table();
}

void GroupState::start_table() {
  entries_.resize(static_cast<size_t>(info_.size()));
  round_active_ = true;
  guarded([&] { channel_->control().start_table(my_entry_, entries_.data(), table_done_); });
}

void GroupState::on_piece_sizes(const std::vector<TableEntry>& entries) {
  const auto sizes = piece_sizes(entries);
  if (!sizes) return broken("a member sent no size where its piece's size was due");
  const OperationPtr operation = take_asked_about();
  operation->contributors = static_cast<int>(result_.active);
  try {
    operation->set_piece_sizes(as_joined() ? sizes->elements : sizes->sizes);
  } catch (const std::exception& failure) {
    // No room for what comes, so the batch cannot be launched, nor any after it: peers would exchange other data.
    const ErrorPtr cause = cannot_prepare_error(info_, *operation, failure.what());
    settle(operation, cause);
    return broken(cause->cause);
  }
  {
    const std::lock_guard lock(queue_mutex_);
    ++statistics_.batched_operations;
  }
  launch_batches({operation});
}

// The operation that asked for it stays in the queue: the next round covers it.
void GroupState::on_devices(const std::vector<TableEntry>& entries) {
  std::string why;
  guarded([&] { why = channel_->device()->introduced(-1, entries); });
  if (why.empty()) {
    if (const ErrorPtr failed = failure()) fail_pending(failed);
    return;
  }
  const OperationPtr operation = take_asked_about();
  settle(operation, no_device_error(info_, *operation, why));
}

void GroupState::on_table(const std::string* error) {
  round_active_ = false;
  if (error != nullptr) return broken(*error);
  mine_.offered = 0;
  if (broken_) {  // nothing comes of it: what it was about has the transport's error, or will have
    entries_.clear();
    if (const ErrorPtr failed = failure()) fail_pending(failed);
    return;
  }
  const std::vector<TableEntry> entries = std::exchange(entries_, {});  // the one thing that grows with the group
  const Table table = std::exchange(table_, Table::kNone);
  if (table == Table::kDevices) {
    on_devices(entries);
    return coordinator_.make_ready(*this);
  }
  if (table == Table::kSizes) {
    on_piece_sizes(entries);
    follow_up();
    return coordinator_.make_ready(*this);
  }
  if (const OperationPtr operation = take_asked_about())
    settle(operation, disagreement_error(info_, *operation, entries));
  coordinator_.make_ready(*this);
}

void GroupState::react_to_members() {
  const bool all_left = result_.leaving == static_cast<uint32_t>(info_.size());
  // Only a round that carried the announcement has told it: the failure may have come while this round was in flight.
  if (mine_.lowest_failed != kNobody) announce_failure_ = false;
  if (result_.lowest_failed != kNobody && !failure()) {
    // It has said why before it entered this round.
    if (given_up_by_ < 0 && coordinator_.inquiries() != nullptr) coordinator_.inquiries()->look();
    const bool known = given_up_by_ == static_cast<int>(result_.lowest_failed);
    give_up(peer_failed_error(info_, static_cast<int>(result_.lowest_failed), known ? given_up_why_ : ""));
    announce_failure_ = false;  // the round that told us has told everybody
  } else if (result_.leaving > 0 && !leaving_ && !failure()) {
    give_up(peer_left_error(info_, static_cast<int>(result_.lowest_leaving)), true);
    announce_failure_ = false;
  }
  all_left_ = all_left_ || all_left;  // advance() closes it
}

void GroupState::leave() {
  leaving_ = true;
  // What a broken transport has ended is told its error now: nobody looks at a group that was left.
  if (broken_ && !failure()) explain_broken(Operation::Clock::time_point::max());
  ErrorPtr error;
  {
    const std::lock_guard lock(queue_mutex_);
    if (!failure_) failure_ = closed_error(info_);
    error = failure_;
  }
  take_submissions();
  // A device could wait for peers that give up, once they learn that this rank has left: then both stop. What has been
  // launched here has been agreed on by all, and comes to its end by itself.
  bool device_busy = false;
  for_unfinished(
      [&](const OperationPtr& o, bool) { device_busy |= o->descriptor.device != DeviceKind::kCpu && !o->launched(); });
  if (device_busy) {
    announce_failure_ = true;
    give_up(error);
  }
  fail_pending(error);
  // A receive that nobody has sent for would keep the engine busy for ever.
  for (const OperationPtr& operation : posted_messages_) abandon(operation, error);
  // Without a channel it is still being made, by all members or by none: it is left once it is there.
  if (creation_failed_) close();
  else coordinator_.make_ready(*this);
}

void GroupState::not_made(ErrorPtr error) {
  creation_failed_ = true;
  give_up(std::move(error));
  announce_failure_ = false;
  if (leaving_) close();
}

// The channel goes once nothing is in flight on it: MPI still works on the memory of what was given up. What never
// ends, because a peer has died, keeps it for as long as the process lives.
void GroupState::close_if_over() {
  if (all_left_ && !round_busy() && !order_active_ && batches_.empty() && channel_ && channel_->idle()) close();
}

void GroupState::close() {
  closed_.store(true);
  coordinator_.close(*this);
}

// Fails what no round in flight has offered; what has been offered is given up but keeps its tensors, since peers may
// still count on this rank's input.
void GroupState::fail_pending(const ErrorPtr& error) {
  const size_t kept = round_busy() ? std::min<size_t>(mine_.offered, pending_.size()) : 0;
  for (size_t i = 0; i < kept; ++i) abandon(pending_[i], error);
  while (pending_.size() > kept) {
    const OperationPtr operation = std::move(pending_.back());
    pending_.pop_back();
    settle(operation, error);
  }
  moved_.resize(std::min(moved_.size(), kept));
  for (const OperationPtr& operation : names_.take_all_but(round_active_ ? mine_.names : NameRecord()))
    settle(operation, error);
  names_.for_each([&](const OperationPtr& operation) { abandon(operation, error); });
  if (pending_.empty()) all_joined_ = false;
  for (const OperationPtr& operation : std::exchange(messages_, {})) settle(operation, error);
}

void GroupState::give_up(ErrorPtr error, bool device_goes_on) {
  {
    const std::lock_guard lock(queue_mutex_);
    if (!failure_) {
      failure_ = error;
      announce_failure_ = true;
    }
  }
  // Also when the group was given up or left before: what it left in flight then has a caller that waits for it.
  take_submissions();
  fail_pending(error);
  for (const OperationPtr& operation : std::exchange(stranded_, {})) settle(operation, error);
  // With anything that is not launched, the communicator must go, and what is launched on it with it.
  for (const BatchInFlight& flight : batches_)
    device_goes_on &= flight.batch.descriptor().device == DeviceKind::kCpu || launched(flight);
  if (!device_goes_on) warn_of_launched(*error);
  for (BatchInFlight& flight : batches_)
    if (!device_goes_on || !launched(flight))
      for (const OperationPtr& operation : flight.batch.operations) abandon(operation, error);
  for (const OperationPtr& operation : posted_messages_) abandon(operation, error);
  if (!device_goes_on) stop_device();
  coordinator_.make_ready(*this);
}

// Their callers have gone on and will not ask again: nobody would tell them.
void GroupState::warn_of_launched(const OperationError& error) {
  size_t count = 0;
  OperationPtr first;
  for_unfinished([&](const OperationPtr& o, bool) {
    if (!o->launched()) return;
    ++count;
    if (!first || o->ticket < first->ticket) first = o;
  });
  if (first) coordinator_.warn(lost_on_device_text(info_, count, *first, error.message));
}

void GroupState::broken(const std::string& what) {
  if (!std::exchange(broken_, true)) broken_why_ = what;
  stop_following_up();
  // A connection breaks before the word of its peer's death is round, which says whose.
  if (coordinator_.inquiries() == nullptr || failure()) explain_broken(Operation::Clock::time_point::max());
}

// Names the member whose death broke the transport, or else, in a while, what the transport has said.
void GroupState::explain_broken(Operation::Clock::time_point now) {
  if (broken_since_ == Operation::Clock::time_point{}) broken_since_ = now;
  OperationPtr oldest = oldest_unfinished();
  const int dead = coordinator_.dead_member(info_, std::chrono::milliseconds(0));
  if (dead >= 0 && oldest) give_up(peer_died_error(info_, dead, *oldest));
  else if (now - broken_since_ >= kWordOfDeath || now == Operation::Clock::time_point::max())
    give_up(broken_error(info_, broken_why_));
  else return;
  announce_failure_ = false;  // there is no way left to tell
}

void GroupState::settle(const OperationPtr& operation, ErrorPtr error) {
  if (error == nullptr && !operation->abandoned && operation->descriptor.device == DeviceKind::kCpu) {
    try {
      operation->finish();
    } catch (const std::exception& failure) {  // of this tensor alone: it must not take the engine's step with it
      error = cannot_finish_error(info_, *operation, failure.what());
    }
  }
  if (!operation->abandoned) {
    trace_.over(*operation, error);
    unfinished_.fetch_sub(1);
  }
  coordinator_.settle(operation, std::move(error));
}

void GroupState::abandon(const OperationPtr& operation, const ErrorPtr& error) {
  if (operation->abandoned) return;
  trace_.over(*operation, error);
  unfinished_.fetch_sub(1);
  if (operation->descriptor.device != DeviceKind::kCpu) {
    operation->exposed = true;  // no copy of it can be made here: its memory stays claimed until it ends
  } else if (operation->prepared && !operation->exposed) {
    try {
      operation->copy_inputs();
    } catch (const std::bad_alloc&) {
      operation->exposed = true;  // no room for a copy: its memory stays claimed
    }
  }
  coordinator_.abandon(operation, error);
}

// Calls use(operation, agreed) for what no caller has been told the end of.
template <typename Use>
void GroupState::for_unfinished(Use use) const {
  const auto each = [&](const auto& operations, bool agreed) {
    for (const OperationPtr& operation : operations)
      if (!operation->abandoned) use(operation, agreed);
  };
  for (const BatchInFlight& flight : batches_) each(flight.batch.operations, true);
  each(stranded_, true);
  each(pending_, false);
  names_.for_each([&](const OperationPtr& operation) {
    if (!operation->abandoned) use(operation, false);
  });
  each(messages_, false);
  each(posted_messages_, false);
}

OperationPtr GroupState::oldest_unfinished() const {
  OperationPtr oldest;
  for_unfinished([&](const OperationPtr& o, bool) {
    if (!oldest || o->ticket < oldest->ticket) oldest = o;
  });
  return oldest;
}

Standing GroupState::standing_of(const Waiting& waiting) const {
  const Operation& operation = *waiting.operation;
  if (channel_ == nullptr) return Standing::kNoChannel;
  if (operation.launched()) return Standing::kLaunched;
  if (waiting.agreed) return Standing::kAgreed;
  // What nothing is in the way of is offered as soon as the round in flight is over, for which a member is missing.
  return operation.prepared || coordinator_.memory().clear(operation) ? Standing::kOffered : Standing::kQueued;
}

// What the operation waits for, in words, as far as it is known.
std::string GroupState::reason_of(const Waiting& waiting) {
  const Operation& operation = *waiting.operation;
  return standing_of(waiting) == Standing::kQueued ? coordinator_.memory().in_the_way(operation)
                                                   : stall_of(operation).describe(info_, operation);
}

GroupReport GroupState::report(Operation::Clock::time_point now) const {
  GroupReport report;
  report.identity = identity();
  report.submitted = sequence();
  report.given_up = failure() != nullptr;
  Waiting oldest[2];
  for_unfinished([&](const OperationPtr& o, bool agreed) {
    ++report.unfinished;
    Waiting& first = oldest[is_point_to_point(o->descriptor.kind) ? 1 : 0];
    if (!first.operation || o->ticket < first.operation->ticket) first = {o, agreed};
  });
  if (report.unfinished == 0) return report;
  report.joined = joined();
  names_.for_each([&](const OperationPtr& o) { report.names.push_back(hash_of_name(o->name)); });
  for (const auto& match : moved_) report.names.push_back(match.hash);
  if (joining()) report.names.push_back(kJoinName);
  report.name = describe();
  report.members = info_.ranks;
  for (const Waiting& waiting : oldest)
    if (waiting.operation) report.waiting.push_back(waiting_report(*waiting.operation, standing_of(waiting), now));
  return report;
}

void GroupState::trace_unfinished() {
  take_submissions();
  for_unfinished([&](const OperationPtr& o, bool) { trace_.unfinished(*o); });
}

void GroupState::answered(int global_rank, const Answer& answer) {
  for (size_t r = 0; r < info_.ranks.size(); ++r) {
    if (info_.ranks[r] != global_rank) continue;
    for (Stall& stall : stalls_) stall.answered(static_cast<int>(r), answer);
  }
}

// Asks about an operation that has waited for long, in good time before its time-out; warns once.
void GroupState::inspect(const Waiting& waiting, Operation::Clock::time_point now) {
  const Operation& operation = *waiting.operation;
  if (channel_ == nullptr || coordinator_.inquiries() == nullptr) return;
  const auto warning = coordinator_.settings().stall_warning;
  // A join waits since the last round: others are at work as long as there are any.
  const bool joined_here = is_join(waiting.operation) && operation.prepared;
  const auto waited = now - (joined_here ? operation.deadline - join_allowance_ : operation.submitted);
  const bool due = warning.count() > 0 && waited >= warning;
  const bool near_end = operation.deadline != Operation::Clock::time_point::max() &&
                        waited >= (operation.deadline - operation.submitted) / 2;
  Stall& stall = stall_of(operation);
  if (!due && !near_end) return;
  if (!stall.asked_about(operation) || (due && !stall.warned))
    stall.ask(info_, operation, identity(), *coordinator_.inquiries(), now);
  if (!due || stall.warned || !stall.ready(now)) return;
  stall.warned = true;
  coordinator_.warn(stall_text(info_, operation, standing_of(waiting), reason_of(waiting),
                               std::chrono::duration_cast<std::chrono::seconds>(waited)));
}

void GroupState::set_timeout(std::chrono::milliseconds timeout) {
  take_submissions();
  for_unfinished([&](const OperationPtr& o, bool) {
    if (o->own_deadline) return;
    o->deadline = o->submitted + timeout;
    if (!is_join(o) || !o->prepared) return;
    join_allowance_ = timeout;
    o->deadline = after(coordinator_.step_time(), timeout);
  });
}

void GroupState::check_deadlines(Operation::Clock::time_point now) {
  if (broken_ && !failure()) explain_broken(now);
  Waiting oldest[2], late;
  for_unfinished([&](const OperationPtr& o, bool agreed) {
    Waiting& first = oldest[is_point_to_point(o->descriptor.kind) ? 1 : 0];
    if (!first.operation || o->ticket < first.operation->ticket) first = {o, agreed};
    // The oldest: what came after it may only be waiting for it.
    if (o->deadline < now && (!late.operation || o->ticket < late.operation->ticket)) late = {o, agreed};
  });
  for (const Waiting& waiting : oldest) {
    if (!waiting.operation) continue;
    trace_.waits(*waiting.operation, now);
    // The dead may have sent before their end what is received only now; a collective cannot do without them.
    const bool message = is_point_to_point(waiting.operation->descriptor.kind);
    if (message && now - waiting.operation->submitted < Coordinator::kGrace) continue;
    const int dead = coordinator_.dead_member(info_, Coordinator::kGrace);
    if (dead < 0) continue;
    give_up(peer_died_error(info_, dead, *waiting.operation));
    announce_failure_ = false;  // everybody learns of a death, and no round with the dead comes to its end
    return;
  }
  const bool told = given_up_by_ >= 0 && !device_stopped_;
  // In time, an operation that is only waiting for its members finds out by itself who is missing.
  if (told && (late.agreed || now - given_up_since_ >= Coordinator::kGrace)) {
    give_up(peer_failed_error(info_, given_up_by_, given_up_why_));
    announce_failure_ = false;  // whoever told us has told everybody
    return;
  }
  for (const Waiting& waiting : oldest) {
    // One operation at a time: asking about two in turn, none would ever have its answers.
    const bool taken =
        late.operation && waiting.operation && &stall_of(*late.operation) == &stall_of(*waiting.operation);
    if (waiting.operation && !taken) inspect(waiting, now);
  }
  if (!late.operation) return;
  // Whoever makes the communicator runs out of time at about the same time, and knows who is missing.
  if (channel_ == nullptr && !creation_failed_ && now - late.operation->deadline < kMakersWord) return;
  InquiryPlane* plane = coordinator_.inquiries();
  if (channel_ != nullptr && plane != nullptr) {
    Stall& stall = stall_of(*late.operation);
    stall.ask(info_, *late.operation, identity(), *plane, now);
    if (!stall.ready(now)) return;  // the next look is not far
  }
  give_up(timeout_error(info_, *late.operation, standing_of(late), reason_of(late)));
}

}  // namespace multicomm
