// What coordinators ask each other when something does not come.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace multicomm {

struct Inquiry {
  uint64_t group;   // identity that all its members know, see Channel::identity
  uint64_t number;  // the asker's; comes back with the answer
  uint64_t name;    // what the members match the operation by, see name_of; 0: its sequence
};

inline constexpr uint64_t kTakesPart = UINT64_MAX;

struct Answer {
  uint64_t group;
  uint64_t number;
  // Collectives of the group that this rank has submitted. kTakesPart: in the one that was asked about, at least.
  uint64_t submitted;
  char text[488];  // what it is doing, for people
};

// A member has given a group up, and tells all others.
struct Notice {
  uint64_t group;
  int32_t by;     // global rank
  char why[500];  // for people
};

// Asks for a rank's part of the picture of the job, see coordinator/picture.h.
struct ReportInquiry {
  uint64_t number;  // the asker's; comes back with the report
  uint8_t stack;    // 1: with the Python stack of the main thread
};
static_assert(std::is_trivially_copyable_v<Inquiry> && std::is_trivially_copyable_v<Answer> &&
              std::is_trivially_copyable_v<Notice> && std::is_trivially_copyable_v<ReportInquiry>);

// Point-to-point between the coordinators of a world, apart from all groups. All calls by the driver, none waits.
class InquiryPlane {
 public:
  virtual ~InquiryPlane() = default;
  virtual void ask(int global_rank, const Inquiry& inquiry) = 0;
  virtual void tell(int global_rank, const Notice& notice) = 0;
  virtual void ask_report(int global_rank, const ReportInquiry& inquiry) = 0;
  virtual void send_report(int global_rank, uint64_t number, const std::string& report) = 0;  // of any length
  virtual void look() = 0;  // takes what has come, to the sink
  // Global ranks whose process is known to have ended without taking leave.
  virtual std::vector<int> dead_ranks() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string place_of(int global_rank) const = 0;  // "host a, pid 12"; empty: not known
  // What this node can see of a rank that does not answer, such as "is stopped"; empty: nothing.
  virtual std::string seen_of(int global_rank) const = 0;
};

class InquirySink {
 public:
  virtual Answer answer(const Inquiry& inquiry) = 0;
  virtual void answered(int global_rank, const Answer& answer) = 0;
  virtual void told(const Notice& notice) = 0;
  virtual void report_asked(int asker, const ReportInquiry& inquiry) = 0;  // answered by send_report, soon
  virtual void report_came(int global_rank, uint64_t number, const std::string& report) = 0;

 protected:
  ~InquirySink() = default;
};

}  // namespace multicomm
