// What every rank of a job is doing, put together on demand.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "coordinator/rank_report.h"
#include "transport/inquiry.h"

namespace multicomm {

class Coordinator;

// Driver only. Asks the coordinators of all ranks, which answer also while their main thread is in Python or waits in
// some group; puts what they report into one text, and sets side by side who has come how far.
class Pictures {
 public:
  using Clock = Operation::Clock;
  using Done = std::function<void(std::string text)>;

  explicit Pictures(Coordinator& coordinator) : coordinator_(coordinator) {}

  // `done` gets the text once all have answered, or have had the time to. Where nobody can be asked yet it is of this
  // rank alone, and says so.
  void take(bool stacks, Done done);
  void asked(int asker, const ReportInquiry& inquiry);
  void came(int global_rank, uint64_t number, const std::string& report);
  void stack_came(const std::string& stack);
  void check(Clock::time_point now);

  // Who this process is as long as the inquiry plane cannot say it.
  void set_place(std::string place) { place_ = std::move(place); }
  void set_rank(int rank, int world_size) { rank_ = rank, world_size_ = world_size; }
  // Has the main thread's Python stack read by another thread, which posts stack_came(). Empty: there is no Python.
  std::function<void()> request_stack;

  static constexpr std::chrono::milliseconds kPatience{2000};      // for the ranks' reports
  static constexpr std::chrono::milliseconds kStackPatience{500};  // for the interpreter

 private:
  struct Picture {
    uint64_t number;
    Done done;
    bool stacks;
    bool alone;             // nobody else can be asked
    std::vector<int> dead;  // not asked
    bool begun = false;
    Clock::time_point since{};
    std::map<int, RankReport> reports{};  // by global rank
    std::vector<int> unreadable{};        // ranks that run another version
  };
  // A report that waits for the stack.
  struct Owed {
    int asker;
    uint64_t number;
    Clock::time_point since{};
  };

  int own_rank() const;
  RankReport own_report() const;
  void send(int asker, uint64_t number, std::string stack);
  bool complete(const Picture& picture) const;
  std::string describe(const Picture& picture) const;
  std::string describe_rank(const Picture& picture, int rank) const;
  std::string describe_absent(const Picture& picture, int rank) const;
  std::string standing_of(const Picture& picture, const GroupReport& group, const WaitingReport& waiting) const;

  Coordinator& coordinator_;
  std::string place_;
  int rank_ = 0;
  int world_size_ = 1;
  uint64_t next_number_ = 1;
  bool stack_requested_ = false;
  Clock::time_point now_{};  // of the last check
  std::vector<Picture> pictures_;
  std::vector<Owed> owed_;
};

}  // namespace multicomm
