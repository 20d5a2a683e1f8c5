#include "coordinator/stall.h"

#include <algorithm>

#include "coordinator/error_text.h"
#include "coordinator/group_state.h"
#include "coordinator/names.h"
#include "coordinator/received.h"

namespace multicomm {

void Stall::ask(const GroupInfo& info, const Operation& operation, uint64_t group, InquiryPlane& plane,
                Clock::time_point now) {
  if (ticket_ != operation.ticket) warned = false;
  if (asked_ && ticket_ == operation.ticket && now - since_ < kFresh) return;
  asked_ = true;
  ticket_ = operation.ticket;
  since_ = now;
  number_ += 2;  // there are two per group
  peers_.clear();
  answers_.clear();
  dead_ = plane.dead_ranks();
  const bool message = is_point_to_point(operation.descriptor.kind);
  for (int r = 0; r < info.size(); ++r) {
    if (r == info.rank || (message && operation.peer >= 0 && r != operation.peer)) continue;
    peers_.push_back(r);
    const int global = info.ranks[static_cast<size_t>(r)];
    if (!is_dead(global)) plane.ask(global, {.group = group, .number = number_, .name = name_of(operation)});
  }
}

void Stall::answered(int rank, const Answer& answer) {
  if (asked_ && answer.number == number_) answers_.insert_or_assign(rank, answer);
}

bool Stall::ready(Clock::time_point now) const {
  return asked_ && (answers_.size() == peers_.size() || now - since_ >= kPatience);
}

bool Stall::is_dead(int global_rank) const { return std::find(dead_.begin(), dead_.end(), global_rank) != dead_.end(); }

std::string Stall::describe(const GroupInfo& info, const Operation& operation) const {
  if (!asked_) return {};
  const bool message = is_point_to_point(operation.descriptor.kind);
  std::vector<int> missing, silent, dead;
  std::string lines;
  for (const int r : peers_) {
    const int global = info.ranks[static_cast<size_t>(r)];
    const auto answer = answers_.find(r);
    if (is_dead(global)) {
      dead.push_back(global);
    } else if (answer == answers_.end()) {
      silent.push_back(global);
    } else if (message || (answer->second.submitted != kTakesPart && answer->second.submitted <= operation.sequence)) {
      missing.push_back(global);
      lines += "\n  rank " + std::to_string(global) + " " + text_in(answer->second.text, sizeof(answer->second.text));
    }
  }
  std::string text;
  const auto add = [&](const std::vector<int>& ranks, const char* one, const char* many) {
    if (ranks.empty()) return;
    text += (text.empty() ? "" : "; ") + ranks_that(ranks, one, many);
  };
  if (!message) add(missing, "has not submitted it", "have not submitted it");
  add(dead, "has died", "have died");
  add(silent, "does not answer (stopped, or cut off)", "do not answer (stopped, or cut off)");
  return text + lines;
}

}  // namespace multicomm
