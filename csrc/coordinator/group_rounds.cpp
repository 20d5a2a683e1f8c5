// A group's rounds: what is offered, what their results mean, and the tables that they ask for.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "coordinator/coordinator.h"
#include "coordinator/error_text.h"
#include "coordinator/faults.h"
#include "coordinator/group_state.h"
#include "coordinator/inline_payload.h"
#include "coordinator/received.h"
#include "coordinator/stand_in.h"

namespace multicomm {
namespace {

constexpr std::chrono::microseconds kShortestRest{20}, kLongestRest{4000};

}  // namespace

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
    join_ = pending_.front();
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
    // The sum over all is 0: one that comes again before its time never fits, and a root must be there (see
    // covered_prefix).
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
    const size_t inlined = finish_inline(std::span(operations).first(covered));
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
  const bool needs_one = as_joined() && (table_ == Table::kSizes || table_ == Table::kDevices);
  stand_in_ = needs_one ? stand_in_for(result_.descriptors[0]) : nullptr;
  return covered;
}

OperationPtr GroupState::stand_in_for(const Descriptor& descriptor) const {
  OperationPtr operation;
  if (descriptor.device != DeviceKind::kCpu) operation = join_->stand_in(descriptor, info_.size());
  if (!operation) operation = std::make_shared<StandIn>(descriptor, info_.size());
  operation->contributors = contributors();
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
      pending_.front()->contributors = contributors();
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
    guarded([&] { channel_->device()->introduce(-1, *asked_about(), my_entry_); });
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
  operation->contributors = contributors();
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
    stand_in_ = nullptr;
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

}  // namespace multicomm
