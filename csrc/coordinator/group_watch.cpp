// Where a group's operations stand, for reports, warnings and time-outs.
#include <utility>

#include "coordinator/coordinator.h"
#include "coordinator/error_text.h"
#include "coordinator/group_state.h"
#include "coordinator/rank_report.h"

namespace multicomm {
namespace {

constexpr std::chrono::milliseconds kMakersWord{1000};

}  // namespace

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
