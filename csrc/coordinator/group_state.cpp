// A group's submissions, messages, and ends.
#include "coordinator/group_state.h"

#include <algorithm>
#include <utility>

#include "coordinator/coordinator.h"
#include "coordinator/error_text.h"
#include "coordinator/rank_report.h"
#include "coordinator/received.h"

namespace multicomm {
namespace {

constexpr std::chrono::seconds kWordOfDeath{3};  // how long a broken transport waits to hear whose death it was

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

}  // namespace multicomm
