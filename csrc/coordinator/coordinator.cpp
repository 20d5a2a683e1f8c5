#include "coordinator/coordinator.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <utility>

#include "coordinator/error_text.h"

namespace multicomm {

namespace {
constexpr std::chrono::milliseconds kDeadlineCheck{50};
constexpr size_t kNotices = 1024;  // remembered: a group is made on all members at once, but for a moment
}  // namespace

Coordinator::Coordinator(Settings settings, Progress& progress, CompletionSink& sink)
    : warn([](const std::string& text) { std::fprintf(stderr, "%s\n", text.c_str()); }),
      settings_(std::move(settings)),
      progress_(progress),
      sink_(sink) {}

GroupPtr Coordinator::add_group(GroupInfo info) {
  auto group = std::make_shared<GroupState>(*this, std::move(info));
  const std::lock_guard lock(inbox_mutex_);
  groups_.push_back(group);
  return group;
}

std::vector<GroupPtr> Coordinator::groups() const {
  const std::lock_guard lock(inbox_mutex_);
  return groups_;
}

void Coordinator::submit(const GroupPtr& group, std::span<const OperationPtr> operations) {
  unfinished_.fetch_add(operations.size(), std::memory_order_relaxed);
  for (auto& [operation, error] : group->enqueue(operations)) {
    unfinished_.fetch_sub(1, std::memory_order_relaxed);
    operation->mark_done(std::move(error));
    sink_.completed(std::move(operation));
  }
  if (group->in_inbox.exchange(true)) return;
  const std::lock_guard lock(inbox_mutex_);
  inbox_groups_.push_back(group);
  inbox_flag_.store(true, std::memory_order_release);
}

void Coordinator::post(std::function<void()> task) {
  const std::lock_guard lock(inbox_mutex_);
  inbox_tasks_.push_back(std::move(task));
  inbox_flag_.store(true, std::memory_order_release);
}

void Coordinator::make_ready(GroupState& group) { ready_.push_back(group.shared_from_this()); }

void Coordinator::wait_for_memory(GroupState& group) { memory_waiters_.push_back(group.shared_from_this()); }

void Coordinator::drain_inbox() {
  if (!has_inbox()) return;
  {
    const std::lock_guard lock(inbox_mutex_);
    drained_groups_.swap(inbox_groups_);
    drained_tasks_.swap(inbox_tasks_);
    inbox_flag_.store(false, std::memory_order_relaxed);
  }
  for (auto& task : drained_tasks_) task();
  drained_tasks_.clear();
  for (GroupPtr& group : drained_groups_) {
    // Cleared before the queue is read: a submission that comes in between enters the inbox again.
    group->in_inbox.store(false);
    ready_.push_back(std::move(group));
  }
  drained_groups_.clear();
}

void Coordinator::drain_ready() {
  for (size_t i = 0; i < ready_.size(); ++i) {  // advance() may make others ready
    const GroupPtr group = ready_[i];
    group->advance();
  }
  ready_.clear();
}

void Coordinator::look_again(GroupState& group, Clock::time_point at) {
  pauses_.push_back({group.shared_from_this(), at});
}

bool Coordinator::step(Clock::time_point now) {
  step_time_ = now;
  const bool polled = progress_.poll() > 0;
  drain_inbox();
  const bool moved = polled || !ready_.empty();
  std::erase_if(pauses_, [&](Pause& pause) {  // after a rest nothing has moved yet: whoever drives may nap
    if (pause.until > now) return false;
    ready_.push_back(std::move(pause.group));
    return true;
  });
  drain_ready();
  while (memory_freed_) {
    memory_freed_ = false;
    ready_.swap(memory_waiters_);
    drain_ready();
  }
  if (now >= next_deadline_check_) {
    next_deadline_check_ = now + kDeadlineCheck;
    now_ = now;
    if (inquiries_ != nullptr) {
      inquiries_->look();
      for (const int rank : inquiries_->dead_ranks()) deaths_.try_emplace(rank, now);
    }
    pictures_.check(now);
    for (const GroupPtr& group : groups()) group->check_deadlines(now);
    drain_ready();
  }
  closed_.clear();
  return moved;
}

bool Coordinator::active() const { return unfinished() > 0 || has_inbox(); }

int Coordinator::dead_member(const GroupInfo& info, std::chrono::milliseconds since) const {
  for (const auto& [rank, learned] : deaths_)
    if (now_ - learned >= since && std::find(info.ranks.begin(), info.ranks.end(), rank) != info.ranks.end())
      return rank;
  return -1;
}

void Coordinator::told(const Notice& notice) {
  notices_.push_back(notice);
  if (notices_.size() > kNotices) notices_.pop_front();
  for (const GroupPtr& group : groups())
    if (group->identity() == notice.group) group->told(notice);
}

const Notice* Coordinator::notice_of(uint64_t group) const {
  const auto it = std::find_if(notices_.begin(), notices_.end(), [&](const Notice& n) { return n.group == group; });
  return it == notices_.end() ? nullptr : &*it;
}

Answer Coordinator::answer(const Inquiry& inquiry) {
  Answer answer{inquiry.group, inquiry.number, 0, {}};
  std::ostringstream text;
  const GroupState* oldest = nullptr;
  OperationPtr waiting;
  bool known = false;
  for (const GroupPtr& group : groups()) {
    if (group->identity() == inquiry.group) {
      known = true;
      answer.submitted = group->sequence();
      text << (group->joined() ? "has joined, and " : "") << "has submitted " << answer.submitted << " collective"
           << (answer.submitted == 1 ? "" : "s") << " of this group";
      const bool comes = inquiry.name != 0 && group->waits_for(inquiry.name);
      if (comes || (inquiry.name != kJoinName && group->joined())) answer.submitted = kTakesPart;
      else if (inquiry.name != 0) answer.submitted = 0;
      if (const ErrorPtr failure = group->failure()) text << ", and given it up";
    }
    const OperationPtr first = group->oldest_unfinished();
    if (first && (!waiting || first->ticket < waiting->ticket)) {
      waiting = first;
      oldest = group.get();
    }
  }
  if (!known) text << "has not made this group, or has left it";
  if (waiting) {
    text << "; it waits in " << oldest->describe() << " for " << numbered(*waiting) << ", for "
         << std::chrono::duration_cast<std::chrono::seconds>(now_ - waiting->submitted).count() << " s";
  } else {
    text << "; it waits for no operation of multicomm";
  }
  const std::string all = text.str();
  std::memcpy(answer.text, all.data(), std::min(all.size(), sizeof(answer.text) - 1));
  return answer;
}

void Coordinator::answered(int global_rank, const Answer& answer) {
  for (const GroupPtr& group : groups())
    if (group->identity() == answer.group) group->answered(global_rank, answer);
}

void Coordinator::settle(OperationPtr operation, ErrorPtr error) {
  memory_.leave(*operation);
  memory_freed_ = true;
  if (!operation->abandoned) {
    operation->mark_done(std::move(error));
    unfinished_.fetch_sub(1, std::memory_order_relaxed);
  }
  sink_.completed(std::move(operation));
}

void Coordinator::launched(const OperationPtr& operation) {
  memory_.leave(*operation);
  memory_freed_ = true;
  operation->mark_launched();
  sink_.launched(operation);
}

void Coordinator::abandon(const OperationPtr& operation, ErrorPtr error) {
  operation->abandoned = true;
  memory_.abandon(*operation);
  memory_freed_ = true;
  operation->mark_done(std::move(error));
  unfinished_.fetch_sub(1, std::memory_order_relaxed);
  sink_.completed(operation);
}

void Coordinator::close(GroupState& group) {
  closed_.push_back(group.shared_from_this());  // it is still on the stack of whoever calls
  auto channel = group.release_channel();
  {
    const std::lock_guard lock(inbox_mutex_);
    std::erase_if(groups_, [&](const GroupPtr& g) { return g.get() == &group; });
  }
  if (channel && on_channel_released) on_channel_released(std::move(channel));
}

}  // namespace multicomm
