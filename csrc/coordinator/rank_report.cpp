#include "coordinator/rank_report.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "coordinator/error_text.h"
#include "coordinator/names.h"

namespace multicomm {
namespace {

constexpr size_t kMostBusy = 32;
constexpr size_t kMostIdle = 4096;
constexpr size_t kMostText = 400;
constexpr size_t kMostNames = 1024;
constexpr size_t kMostStack = 16 << 10;

std::string cut(const std::string& text, size_t most) {
  if (text.size() <= most) return text;
  return text.substr(0, most) + "... (" + std::to_string(text.size() - most) + " more characters)";
}

class Packer {
 public:
  void number(uint64_t value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof(value)); }
  void text(const std::string& value) {
    number(value.size());
    bytes += value;
  }
  // As runs: a group of thousands is mostly one of them.
  void ranks(std::vector<int> value) {
    std::sort(value.begin(), value.end());
    std::vector<std::pair<int, int>> runs;
    for (const int rank : value) {
      if (!runs.empty() && runs.back().second + 1 == rank) runs.back().second = rank;
      else runs.emplace_back(rank, rank);
    }
    number(runs.size());
    for (const auto& [first, last] : runs) {
      number(static_cast<uint64_t>(first));
      number(static_cast<uint64_t>(last));
    }
  }
  std::string bytes;
};

class Unpacker {
 public:
  explicit Unpacker(const std::string& bytes) : bytes_(bytes) {}
  uint64_t number() {
    uint64_t value;
    std::memcpy(&value, take(sizeof(value)), sizeof(value));
    return value;
  }
  // Of things that take at least eight bytes each: a wrong one must not become a huge allocation.
  size_t count() {
    const uint64_t value = number();
    if (value > (bytes_.size() - at_) / sizeof(uint64_t)) throw std::runtime_error("not a report");
    return static_cast<size_t>(value);
  }
  std::string text() {
    const uint64_t size = number();
    return {take(size), static_cast<size_t>(size)};
  }
  std::vector<int> ranks() {
    constexpr uint64_t kMost = 1 << 24;
    std::vector<int> value;
    for (size_t runs = count(); runs > 0; --runs) {
      const uint64_t first = number(), last = number();
      if (last >= kMost || first > last || value.size() > kMost) throw std::runtime_error("not a report");
      for (uint64_t rank = first; rank <= last; ++rank) value.push_back(static_cast<int>(rank));
    }
    return value;
  }

 private:
  const char* take(uint64_t size) {
    if (size > bytes_.size() - at_) throw std::runtime_error("not a report");
    const char* begin = bytes_.data() + at_;
    at_ += static_cast<size_t>(size);
    return begin;
  }
  const std::string& bytes_;
  size_t at_ = 0;
};

}  // namespace

WaitingReport waiting_report(const Operation& operation, Standing standing, Operation::Clock::time_point now) {
  const auto since = std::max(now - operation.submitted, Operation::Clock::duration{});  // `now` may be a moment old
  return {numbered(operation),
          operation.ticket,
          operation.sequence,
          name_of(operation),
          is_point_to_point(operation.descriptor.kind),
          standing,
          std::chrono::duration_cast<std::chrono::milliseconds>(since)};
}

std::string pack(RankReport report) {
  Packer packer;
  if (report.busy.size() > kMostBusy) {
    report.more_busy += report.busy.size() - kMostBusy;
    // Of the rest it still counts how far this rank has come.
    report.idle.insert(report.idle.end(), report.busy.begin() + kMostBusy, report.busy.end());
    report.busy.resize(kMostBusy);
  }
  if (report.idle.size() > kMostIdle) report.idle.resize(kMostIdle);
  packer.number(report.busy.size());
  for (const GroupReport& group : report.busy) {
    packer.number(group.identity);
    packer.number(group.submitted);
    packer.number(group.unfinished);
    packer.number(group.given_up ? 1 : 0);
    packer.number(group.joined ? 1 : 0);
    packer.text(cut(group.name, kMostText));
    packer.ranks(group.members);
    packer.number(std::min(group.names.size(), kMostNames));
    for (size_t i = 0; i < group.names.size() && i < kMostNames; ++i) packer.number(group.names[i]);
    packer.number(group.waiting.size());
    for (const WaitingReport& waiting : group.waiting) {
      packer.text(cut(waiting.text, kMostText));
      packer.number(waiting.ticket);
      packer.number(waiting.sequence);
      packer.number(waiting.name);
      packer.number(waiting.message ? 1 : 0);
      packer.number(static_cast<uint64_t>(waiting.standing));
      packer.number(static_cast<uint64_t>(waiting.since.count()));
    }
  }
  packer.number(report.more_busy);
  packer.number(report.idle.size());
  for (const GroupReport& group : report.idle) {
    packer.number(group.identity);
    packer.number(group.submitted);
    packer.number(group.given_up ? 1 : 0);
  }
  packer.text(cut(report.stack, kMostStack));
  return std::move(packer.bytes);
}

RankReport unpack_report(const std::string& bytes) {
  Unpacker unpacker(bytes);
  RankReport report;
  report.busy.resize(unpacker.count());
  for (GroupReport& group : report.busy) {
    group.identity = unpacker.number();
    group.submitted = unpacker.number();
    group.unfinished = unpacker.number();
    group.given_up = unpacker.number() != 0;
    group.joined = unpacker.number() != 0;
    group.name = unpacker.text();
    group.members = unpacker.ranks();
    group.names.resize(unpacker.count());
    for (uint64_t& name : group.names) name = unpacker.number();
    group.waiting.resize(unpacker.count());
    for (WaitingReport& waiting : group.waiting) {
      waiting.text = unpacker.text();
      waiting.ticket = unpacker.number();
      waiting.sequence = unpacker.number();
      waiting.name = unpacker.number();
      waiting.message = unpacker.number() != 0;
      waiting.standing = static_cast<Standing>(unpacker.number());
      waiting.since = std::chrono::milliseconds(unpacker.number());
    }
  }
  report.more_busy = unpacker.number();
  report.idle.resize(unpacker.count());
  for (GroupReport& group : report.idle) {
    group.identity = unpacker.number();
    group.submitted = unpacker.number();
    group.given_up = unpacker.number() != 0;
  }
  report.stack = unpacker.text();
  return report;
}

}  // namespace multicomm
