// The texts of errors: each names group, operation, sequence and ranks, and says what to do.
#pragma once

#include <string>
#include <vector>

#include "coordinator/group_state.h"

namespace multicomm {

std::string rank_list(std::vector<int> ranks);              // "0-3, 5"
std::string ranks_in_order(const std::vector<int>& ranks);  // the same, as they stand
// "rank 2 has died", "ranks 2-4 have died"; empty for no ranks.
std::string ranks_that(const std::vector<int>& ranks, const char* one, const char* many);
std::string numbered(const Operation& operation);  // "collective 4, all_reduce(SUM) of Float [3]"
std::string error_prefix(const GroupInfo& info);   // "multicomm: rank 1: group 'name' (ranks [0, 1]): "
std::string group_text(const GroupInfo& info);     // "group 'name' (ranks [0, 2])"
ErrorPtr disagreement_error(const GroupInfo& info, const Operation& operation, const std::vector<TableEntry>& table);
// How the line of a rank that has joined begins.
inline constexpr const char* kJoined = "has joined";
ErrorPtr name_clash_error(const GroupInfo& info, const Operation& operation);
// `why`: what it said of that, if it did.
ErrorPtr peer_failed_error(const GroupInfo& info, int global_rank, const std::string& why);
// `waiting`: one of the operations that it leaves unfinished.
ErrorPtr peer_died_error(const GroupInfo& info, int global_rank, const Operation& waiting);
ErrorPtr peer_left_error(const GroupInfo& info, int global_rank);
ErrorPtr closed_error(const GroupInfo& info);
ErrorPtr aborted_error(const GroupInfo& info, const std::string& reason);
ErrorPtr not_made_error(const GroupInfo& info, const std::string& why, bool timed_out);
// The members cannot move device tensors together.
ErrorPtr no_device_error(const GroupInfo& info, const Operation& operation, const std::string& why);
// `count` operations whose callers have gone on were on the device when the group was given up.
std::string lost_on_device_text(const GroupInfo& info, size_t count, const Operation& first, const std::string& why);
ErrorPtr broken_error(const GroupInfo& info, const std::string& what);
ErrorPtr message_error(const GroupInfo& info, const Operation& operation, const OperationError& cause);
ErrorPtr withdrawn_error(const GroupInfo& info, const Operation& operation);
ErrorPtr lost_memory_error(const GroupInfo& info, const Operation& operation, const std::string& lost);
ErrorPtr cannot_prepare_error(const GroupInfo& info, const Operation& operation, const std::string& what);
ErrorPtr cannot_finish_error(const GroupInfo& info, const Operation& operation, const std::string& what);

// How far an operation came before its time ran out.
enum class Standing : int { kNoChannel, kQueued, kOffered, kAgreed, kLaunched };
// `who`: what its peers were found to be doing, see Stall::describe.
ErrorPtr timeout_error(const GroupInfo& info, const Operation& operation, Standing standing, const std::string& who);
std::string stall_text(const GroupInfo& info, const Operation& operation, Standing standing, const std::string& who,
                       std::chrono::seconds since);

}  // namespace multicomm
