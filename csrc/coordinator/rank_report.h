// One rank's part of the picture of a job, and how it travels.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/operation.h"

namespace multicomm {

enum class Standing : int;

// An operation that is the oldest unfinished one of its kind in its group.
struct WaitingReport {
  std::string text;  // "collective 4, all_reduce(SUM) of Float [3]"
  uint64_t ticket = 0;
  uint64_t sequence = 0;
  uint64_t name = 0;     // what the members match it by, see name_of; 0: its sequence
  bool message = false;  // point-to-point
  Standing standing{};
  std::chrono::milliseconds since{};
};

struct GroupReport {
  uint64_t identity = 0;   // 0: its communicator does not exist yet
  uint64_t submitted = 0;  // collectives
  uint64_t unfinished = 0;
  bool given_up = false;
  bool joined = false;
  // Only where something is unfinished:
  std::string name;          // "group 'name' (ranks [0, 2])"
  std::vector<int> members;  // global ranks
  std::vector<WaitingReport> waiting;
  std::vector<uint64_t> names;  // of all that wait by one, see name_of
};

struct RankReport {
  std::vector<GroupReport> busy;  // with something unfinished, the longest wait first
  uint64_t more_busy = 0;         // of which only the number is told
  std::vector<GroupReport> idle;  // identity and `submitted` only
  std::string stack;              // of the main thread, a line per call; empty: not asked for
};

WaitingReport waiting_report(const Operation& operation, Standing standing, Operation::Clock::time_point now);
// Bounded, whatever a rank does: long texts and lists are cut, and say so.
std::string pack(RankReport report);
// Throws std::runtime_error when the bytes are not a report.
RankReport unpack_report(const std::string& bytes);

}  // namespace multicomm
