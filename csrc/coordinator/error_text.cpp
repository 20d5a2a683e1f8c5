#include "coordinator/error_text.h"

#include <algorithm>
#include <sstream>

#include "coordinator/received.h"

namespace multicomm {
namespace {

// What all members call it.
std::string id_of(const Operation& operation) {
  if (is_point_to_point(operation.descriptor.kind)) return "message " + std::to_string(operation.sequence);
  return "collective " + (operation.name.empty() ? std::to_string(operation.sequence) : "'" + operation.name + "'");
}

ErrorPtr make_error(ErrorKind kind, std::string message, std::string cause = {}) {
  return std::make_shared<const OperationError>(OperationError{kind, std::move(message), std::move(cause)});
}

int own_rank(const GroupInfo& info) { return info.ranks[static_cast<size_t>(info.rank)]; }

}  // namespace

std::string error_prefix(const GroupInfo& info) {
  return "multicomm: rank " + std::to_string(own_rank(info)) + ": " + group_text(info) + ": ";
}

std::string rank_list(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  return ranks_in_order(ranks);
}

std::string ranks_in_order(const std::vector<int>& ranks) {
  std::ostringstream text;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (i > 0) text << ", ";
    text << ranks[i];
    if (last > i) text << (last == i + 1 ? ", " : "-") << ranks[last];
    i = last + 1;
  }
  return text.str();
}

std::string ranks_that(const std::vector<int>& ranks, const char* one, const char* many) {
  if (ranks.empty()) return {};
  return (ranks.size() == 1 ? "rank " : "ranks ") + rank_list(ranks) + " " + (ranks.size() == 1 ? one : many);
}

std::string numbered(const Operation& operation) { return id_of(operation) + ", " + operation.describe(); }

std::string group_text(const GroupInfo& info) {
  std::ostringstream text;
  text << "group '" << info.name << "' (ranks [";
  constexpr size_t kShown = 16;
  for (size_t i = 0; i < info.ranks.size() && i < kShown; ++i) text << (i > 0 ? ", " : "") << info.ranks[i];
  if (info.ranks.size() > kShown) text << ", ... " << info.ranks.size() << " in all";
  text << "])";
  return text.str();
}

ErrorPtr disagreement_error(const GroupInfo& info, const Operation& operation, const std::vector<TableEntry>& table) {
  // Ranks that asked for the same are shown in one line; the order is that of each line's first rank.
  struct Line {
    std::string text;
    std::vector<int> ranks;
  };
  std::vector<Line> lines;
  for (size_t r = 0; r < table.size(); ++r) {
    const std::string text = text_in(table[r].text, sizeof(table[r].text));
    auto it = std::find_if(lines.begin(), lines.end(), [&](const Line& line) { return line.text == text; });
    if (it == lines.end()) it = lines.insert(lines.end(), Line{text, {}});
    it->ranks.push_back(info.ranks[r]);
  }
  std::ostringstream message;
  message << error_prefix(info) << "the ranks disagree on " << id_of(operation) << ":";
  for (const Line& line : lines) {
    message << "\n  rank" << (line.ranks.size() > 1 ? "s " : " ") << rank_list(line.ranks) << ": " << line.text;
  }
  const bool joined =
      std::any_of(lines.begin(), lines.end(), [](const Line& l) { return l.text.starts_with(kJoined); });
  message << "\nNo tensor was changed and the group can be used further. ";
  if (joined) message << "Call it before any rank joins, or after all have.";
  else
    message << "Make every rank of the group call the same operation, with what fits together, "
            << (operation.name.empty() ? "in the same order." : "under the same name.");
  return make_error(ErrorKind::kUsage, message.str());
}

ErrorPtr name_clash_error(const GroupInfo& info, const Operation& operation) {
  return make_error(ErrorKind::kUsage, error_prefix(info) + numbered(operation) +
                                           ": another name of this group has the same hash. Choose another name.");
}

ErrorPtr peer_failed_error(const GroupInfo& info, int global_rank, const std::string& why) {
  const std::string reason = why.empty() ? std::string(" (a time-out or an abort; its own error says which). ")
                                         : ": " + why + (why.find('\n') == std::string::npos ? ". " : "\n");
  return make_error(ErrorKind::kAborted,
                    error_prefix(info) + "rank " + std::to_string(global_rank) + " gave this group up" + reason +
                        "The group cannot be used further: destroy it and make a new one.",
                    "rank " + std::to_string(global_rank) + " had given it up" + (why.empty() ? "" : ": " + why));
}

ErrorPtr peer_died_error(const GroupInfo& info, int global_rank, const Operation& waiting) {
  const std::string cause = "the process of rank " + std::to_string(global_rank) +
                            " has ended (killed, crashed, or gone without destroy_process_group)";
  return make_error(ErrorKind::kBroken,
                    error_prefix(info) + cause + ", so " + numbered(waiting) +
                        " cannot complete. The group cannot be used further; its other members have the same error.",
                    cause);
}

ErrorPtr peer_left_error(const GroupInfo& info, int global_rank) {
  return make_error(ErrorKind::kUsage,
                    error_prefix(info) + "rank " + std::to_string(global_rank) +
                        " has destroyed this group, so no further operation can complete on it. Let every "
                        "rank finish its operations before it calls destroy_process_group.");
}

ErrorPtr closed_error(const GroupInfo& info) {
  return make_error(ErrorKind::kAborted,
                    error_prefix(info) + "this rank has destroyed or aborted the group; make a new one.",
                    "destroyed there with work pending");
}

ErrorPtr aborted_error(const GroupInfo& info, const std::string& reason) {
  return make_error(ErrorKind::kAborted,
                    error_prefix(info) + "aborted on this rank (" + reason + "); make a new group.",
                    "aborted there (" + reason + ")");
}

ErrorPtr not_made_error(const GroupInfo& info, const std::string& why, bool timed_out) {
  return make_error(timed_out ? ErrorKind::kTimeout : ErrorKind::kBroken,
                    error_prefix(info) + "its communicator could not be made: " + why);
}

ErrorPtr no_device_error(const GroupInfo& info, const Operation& operation, const std::string& why) {
  return make_error(ErrorKind::kUsage, error_prefix(info) + numbered(operation) + ": " + why +
                                           "\nNo tensor was changed, and the group can be used further.");
}

std::string lost_on_device_text(const GroupInfo& info, size_t count, const Operation& first, const std::string& why) {
  return error_prefix(info) + "given up with " + std::to_string(count) + " operation" + (count == 1 ? "" : "s") +
         " on the device whose callers may have gone on, the first of them " + numbered(first) +
         ". What the device made of " + (count == 1 ? "it" : "them") + " is undefined. The reason: " + why;
}

ErrorPtr broken_error(const GroupInfo& info, const std::string& what) {
  return make_error(ErrorKind::kBroken, error_prefix(info) + what + ". The group cannot be used further.", what);
}

ErrorPtr message_error(const GroupInfo& info, const Operation& operation, const OperationError& cause) {
  return make_error(cause.kind, error_prefix(info) + numbered(operation) + ": " + cause.message);
}

ErrorPtr withdrawn_error(const GroupInfo& info, const Operation& operation) {
  return make_error(ErrorKind::kTimeout, error_prefix(info) + numbered(operation) + ": nothing came in time.");
}

ErrorPtr lost_memory_error(const GroupInfo& info, const Operation& operation, const std::string& lost) {
  return make_error(ErrorKind::kUsage,
                    error_prefix(info) + operation.describe() +
                        ": its memory may still be read or written for an operation that was given up (" + lost +
                        "), which MPI cannot call back. Use another tensor, such as a clone().");
}

ErrorPtr cannot_prepare_error(const GroupInfo& info, const Operation& operation, const std::string& what) {
  const std::string cause = numbered(operation) + ": no contiguous copy of its tensors could be made: " + what;
  return make_error(ErrorKind::kBroken,
                    error_prefix(info) + cause + ". The group is given up; destroy it and make a new one.", cause);
}

ErrorPtr cannot_finish_error(const GroupInfo& info, const Operation& operation, const std::string& what) {
  return make_error(ErrorKind::kUsage, error_prefix(info) + numbered(operation) +
                                           ": its result could not be copied into the tensor: " + what +
                                           ". The other ranks have theirs, and the group can be used further.");
}

namespace {

std::string standing_text(const Operation& operation, Standing standing, const std::string& who) {
  switch (standing) {
    case Standing::kNoChannel:
      return "the group's communicator does not exist yet; a rank of the group has not made it, or a rank of the "
             "default "
             "world has not started multicomm";
    case Standing::kQueued:
      return "it has not begun, since an operation that this rank submitted before it is not done" +
             (who.empty() ? "" : " and uses the same memory: " + who);
    case Standing::kOffered:
      if (is_point_to_point(operation.descriptor.kind))
        return std::string("the peer did not come") + (who.empty() || who.front() == '\n' ? "" : "; ") + who;
      return who.empty() || who.front() == '\n' ? "not every rank of the group has submitted it" + who : who;
    case Standing::kAgreed:
      return "every rank has submitted it, but its data is still on the way" + (who.empty() ? "" : "; " + who);
    case Standing::kLaunched:
      return "every rank has submitted it, and this rank's device has it in its queue, but is not done with it: "
             "something before it in the queue does not end, or another rank's device does not come to it" +
             (who.empty() ? "" : "; " + who);
  }
  return {};
}

}  // namespace

ErrorPtr timeout_error(const GroupInfo& info, const Operation& operation, Standing standing, const std::string& who) {
  const std::string text = "time-out of " + numbered(operation) + ": " + standing_text(operation, standing, who);
  const bool lines = text.find('\n') != std::string::npos;
  return make_error(ErrorKind::kTimeout,
                    error_prefix(info) + text + (lines ? "\n" : ". ") +
                        "The group is given up on this rank; destroy it and make a new one, or set a longer time-out.",
                    text);
}

std::string stall_text(const GroupInfo& info, const Operation& operation, Standing standing, const std::string& who,
                       std::chrono::seconds since) {
  return error_prefix(info) + numbered(operation) + " has been waiting for " + std::to_string(since.count()) +
         " s: " + standing_text(operation, standing, who);
}

}  // namespace multicomm
