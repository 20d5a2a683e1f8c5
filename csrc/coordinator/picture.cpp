#include "coordinator/picture.h"

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "coordinator/coordinator.h"
#include "coordinator/error_text.h"

namespace multicomm {
namespace {

constexpr const char* kNoStack =
    "main thread: no Python stack within 0.5 s: the interpreter is held by native code (or this process gets no "
    "processor time)";

template <typename T>
bool contains(const std::vector<T>& ranks, T rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

// Group `identity` as another rank has it; null when it does not, or never heard of it.
const GroupReport* find_group(const RankReport& report, uint64_t identity) {
  for (const auto* groups : {&report.busy, &report.idle})
    for (const GroupReport& group : *groups)
      if (group.identity == identity) return &group;
  return nullptr;
}

// Indents every line.
std::string indented(const std::string& text, const char* indent) {
  std::istringstream lines(text);
  std::string all;
  for (std::string line; std::getline(lines, line);) all += indent + line + '\n';
  return all;
}

std::string seconds_text(std::chrono::milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof(text), time.count() < 10'000 ? "%.1f s" : "%.0f s",
                static_cast<double>(time.count()) / 1000);
  return text;
}

}  // namespace

int Pictures::own_rank() const {
  const InquiryPlane* plane = coordinator_.inquiries();
  return plane == nullptr ? rank_ : plane->rank();
}

void Pictures::take(bool stacks, Done done) {
  InquiryPlane* plane = coordinator_.inquiries();
  Picture picture{next_number_++, std::move(done), stacks, plane == nullptr, {}};
  const ReportInquiry inquiry{picture.number, static_cast<uint8_t>(stacks ? 1 : 0)};
  if (plane != nullptr) {
    picture.dead = plane->dead_ranks();
    for (int r = 0; r < plane->size(); ++r)
      if (r != plane->rank() && !contains(picture.dead, r)) plane->ask_report(r, inquiry);
  }
  pictures_.push_back(std::move(picture));  // check() asks this rank itself, once its submissions are in their queues
}

void Pictures::asked(int asker, const ReportInquiry& inquiry) {
  if (inquiry.stack == 0 || !request_stack) return send(asker, inquiry.number, {});
  owed_.push_back({asker, inquiry.number});
  if (!std::exchange(stack_requested_, true)) request_stack();
}

void Pictures::stack_came(const std::string& stack) {
  stack_requested_ = false;
  for (const Owed& owed : std::exchange(owed_, {})) send(owed.asker, owed.number, stack);
}

void Pictures::send(int asker, uint64_t number, std::string stack) {
  RankReport report = own_report();
  report.stack = std::move(stack);
  const std::string bytes = pack(std::move(report));
  if (asker == own_rank()) came(asker, number, bytes);
  else coordinator_.inquiries()->send_report(asker, number, bytes);
}

RankReport Pictures::own_report() const {
  RankReport report;
  for (const GroupPtr& group : coordinator_.groups()) {
    GroupReport one = group->report(now_);
    (one.waiting.empty() ? report.idle : report.busy).push_back(std::move(one));
  }
  const auto oldest = [](const GroupReport& group) {
    uint64_t ticket = group.waiting.front().ticket;
    for (const WaitingReport& waiting : group.waiting) ticket = std::min(ticket, waiting.ticket);
    return ticket;
  };
  std::sort(report.busy.begin(), report.busy.end(),
            [&](const GroupReport& a, const GroupReport& b) { return oldest(a) < oldest(b); });
  return report;
}

void Pictures::came(int global_rank, uint64_t number, const std::string& report) {
  for (Picture& picture : pictures_) {
    if (picture.number != number) continue;
    try {
      picture.reports.insert_or_assign(global_rank, unpack_report(report));
    } catch (const std::runtime_error&) {
      picture.unreadable.push_back(global_rank);
    }
  }
}

bool Pictures::complete(const Picture& picture) const {
  if (picture.alone) return !picture.reports.empty();
  const auto ranks = static_cast<size_t>(coordinator_.inquiries()->size());
  return picture.reports.size() + picture.dead.size() + picture.unreadable.size() >= ranks;
}

void Pictures::check(Clock::time_point now) {
  now_ = now;
  std::vector<Owed> late;
  std::erase_if(owed_, [&](Owed& owed) {
    if (owed.since == Clock::time_point{}) owed.since = now;
    if (now - owed.since < kStackPatience) return false;
    late.push_back(owed);
    return true;
  });
  for (const Owed& owed : late) send(owed.asker, owed.number, kNoStack);
  for (Picture& picture : pictures_) {
    if (std::exchange(picture.begun, true)) continue;
    picture.since = now;
    asked(own_rank(), {picture.number, static_cast<uint8_t>(picture.stacks ? 1 : 0)});
  }
  for (size_t i = 0; i < pictures_.size();) {
    Picture& picture = pictures_[i];
    if (!complete(picture) && now - picture.since < kPatience) {
      ++i;
      continue;
    }
    const Picture over = std::move(picture);
    pictures_.erase(pictures_.begin() + static_cast<std::ptrdiff_t>(i));
    over.done(describe(over));
  }
}

std::string Pictures::describe(const Picture& picture) const {
  const int ranks = picture.alone ? world_size_ : coordinator_.inquiries()->size();
  std::string text = "multicomm: what the one rank of the job is doing\n";
  if (ranks > 1) {
    text = "multicomm: what the " + std::to_string(ranks) + " ranks of the job are doing, as told to rank " +
           std::to_string(own_rank()) + "\n";
  }
  if (picture.alone && ranks > 1) {
    text +=
        "MPI is not up yet on this rank, so the others cannot be asked: its start waits until every rank has come to "
        "its first multicomm group\n";
  }
  for (int r = 0; r < ranks; ++r)
    if (!picture.alone || r == rank_) text += describe_rank(picture, r);
  return text;
}

std::string Pictures::describe_rank(const Picture& picture, int rank) const {
  const std::string place = picture.alone ? place_ : coordinator_.inquiries()->place_of(rank);
  std::string text = "rank " + std::to_string(rank) + (place.empty() ? "" : ", " + place) + "\n";
  const auto found = picture.reports.find(rank);
  if (found == picture.reports.end()) return text + "  " + describe_absent(picture, rank) + "\n";
  const RankReport& report = found->second;
  for (const GroupReport& group : report.busy) {
    text += "  " + group.name + ": " + std::to_string(group.submitted) +
            (group.submitted == 1 ? " collective" : " collectives") + " submitted, " +
            std::to_string(group.unfinished) + (group.unfinished == 1 ? " operation" : " operations") + " unfinished" +
            (group.given_up ? ", given up" : "") + "\n";
    for (const WaitingReport& waiting : group.waiting)
      text += "    " + waiting.text + ", for " + seconds_text(waiting.since) + ": " +
              standing_of(picture, group, waiting) + "\n";
  }
  if (report.more_busy > 0)
    text += "  ... and " + std::to_string(report.more_busy) + " more groups with something unfinished\n";
  if (report.busy.empty()) text += "  waits for no operation of multicomm\n";
  text += indented(report.stack, "  ");
  return text;
}

std::string Pictures::describe_absent(const Picture& picture, int rank) const {
  // Some die after they were asked.
  if (!picture.alone && contains(coordinator_.inquiries()->dead_ranks(), rank)) return "has died";
  if (contains(picture.unreadable, rank)) return "runs another version of multicomm: its answer cannot be read";
  const std::string seen = picture.alone ? std::string() : coordinator_.inquiries()->seen_of(rank);
  return "does not answer" + (seen.empty() ? " (stopped, cut off, or at the end of its program)" : ": it " + seen);
}

// How far it has come, and who holds it up. The reports are not of one moment: in a job at work a rank may have come in
// between.
std::string Pictures::standing_of(const Picture& picture, const GroupReport& group,
                                  const WaitingReport& waiting) const {
  std::vector<int> missing, left, silent, dead;
  for (const int r : group.members) {
    const auto found = picture.reports.find(r);
    if (found == picture.reports.end()) {
      (contains(picture.dead, r) ? dead : silent).push_back(r);
      continue;
    }
    const GroupReport* theirs = find_group(found->second, group.identity);
    if (theirs == nullptr || theirs->given_up) left.push_back(r);
    else if (theirs->joined && waiting.name != kJoinName) continue;
    else if (waiting.name != 0 ? !contains(theirs->names, waiting.name) : theirs->submitted <= waiting.sequence)
      missing.push_back(r);
  }
  std::string text;
  const auto add = [&](const std::string& part) {
    if (!part.empty()) text += "; " + part;
  };
  const bool offered = waiting.standing == Standing::kOffered && !waiting.message;
  if (offered) {
    add(ranks_that(missing, "has not submitted it", "have not submitted it"));
    add(ranks_that(left, "has left the group or given it up", "have left the group or given it up"));
  }
  add(ranks_that(dead, "has died", "have died"));
  add(ranks_that(silent, "does not answer", "do not answer"));
  switch (waiting.standing) {
    case Standing::kNoChannel:
      return "the group's communicator does not exist yet (not every rank has made the group, or started multicomm)" +
             text;
    case Standing::kQueued: return "queued; an operation submitted before it, on the same memory, is not done";
    case Standing::kOffered:
      if (waiting.message) return "posted; the peer has not come";
      return "offered" + (text.empty() ? "; by now every rank has submitted it" : text);
    case Standing::kAgreed: return "agreed; its data is on the way" + text;
    case Standing::kLaunched: return "launched; its device is not done with it" + text;
  }
  return "in a state that this version of multicomm does not know";
}

}  // namespace multicomm
