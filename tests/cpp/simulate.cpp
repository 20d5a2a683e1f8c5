// Random programs over random overlapping groups, on simulated ranks, against a plain computation.
//
//   simulate [FIRST_SEED [SEEDS]] [--fault NAME] [--trace]
//
// Each rank runs the real coordinator and the real driver, with its coordinator thread and one to three user threads as
// fibers; a seeded scheduler decides every switch of threads and every delivery, and time is virtual. A program makes
// groups, runs collectives on host and device, messages, and destroys groups; members join; it is legal per group, and
// each rank interleaves its groups as it likes, and moves what has a name. A device runs strictly in launch order and
// blocks until all members have come.
//
// In some seeds one thing goes wrong: a rank dies or is stopped for a while, a member never comes, leaves early or
// aborts, or asks for something else than its peers. Checked: every operation ends; with the right result, or with an
// error where the trouble explains it, in the time that it may take, that names group and culprit and leaves the tensor
// alone unless a device had it; the groups without the culprit have all their results and their devices; nobody sleeps
// with work outstanding; groups part in order; no memory stays claimed. A failing seed is run again with its schedule
// printed.
//
// --fault plants a fault in the engine (see coordinator/faults.h), which the simulation must find.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "coordinator/driver.h"
#include "coordinator/error_text.h"
#include "coordinator/faults.h"
#include "transport/sim/fibers.h"
#include "transport/sim/sim_world.h"

namespace {

using namespace multicomm;
using namespace std::chrono_literals;
using sim::Random;
using sim::Scheduler;
using sim::SimWorld;
using sim::TimePoint;
using SimDriver = BasicDriver<sim::FiberPlatform>;
using std::chrono::milliseconds;

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void require(bool condition, const std::string& what) {
  if (!condition) throw Failure(what);
}

template <typename Base>
struct Timed final : Base {
  using Base::Base;
  std::string describe() const override { return Base::describe() + peer_text; }
  void finalize() override { ended = Scheduler::current().now(); }
  std::string peer_text;
  TimePoint ended{};
};
using Call = Timed<sim::PlainOperation>;
using GatherCall = Timed<sim::VariableGather>;

constexpr milliseconds kLongTimeout{8000};

enum class Trouble { kNone, kAbsent, kDies, kStopped, kLeaves, kAborts };

// One thing that a program does, on all members of a group; a message on two of them.
struct Step {
  enum class Kind { kMake, kCollective, kMessage, kJoin, kDestroy } kind;
  size_t group;
  Descriptor descriptor{};
  size_t buffer = 0;
  int deviant = -1;              // member whose descriptor differs
  std::string name{};            // of a collective that ranks may submit in different orders
  std::vector<bool> absent{};    // by member: has joined before; empty: nobody has
  bool senseless = false;        // without those that have joined
  int source = -1, target = -1;  // members, of a message
  int tag = 0;
  bool any_source = false;
  std::vector<std::vector<int64_t>> after{};  // by member: what the buffer then holds
  std::vector<OperationPtr> calls{};          // by member
};

struct Group {
  std::string name;
  std::vector<int> members;
  sim::SimGroup* made = nullptr;
  std::vector<GroupPtr> handles;  // by member
  size_t steps_left = 0;          // while planning
  size_t operations = 0;
  size_t named = 0;
  size_t join_left = 0;  // while planning: steps until all have joined
  std::vector<bool> joined{};
  bool affected = false;
};

struct Buffer {
  std::vector<std::vector<int64_t>> first, values;  // by rank
  size_t group = 0;                                 // that it was made for
  bool had_message = false;
  bool own = false;  // used once
  DeviceKind device = DeviceKind::kCpu;
};

class Program {
 public:
  Program(uint64_t seed, bool trace) : random_(mix(seed)), trace_(trace) {
    plan_settings(seed);
    plan_groups();
    plan_trouble();
    plan_steps();
    compute();
  }
  ~Program() {
    if (scheduler_) scheduler_->unwind();
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void run() {
    for (int r = 0; r < world_->size(); ++r) {
      sim::FiberPlatform::Thread::rank_of_next = r;
      world_->coordinator(r).warn = [](const std::string&) {};  // of groups given up with work on the device
      drivers_.push_back(std::make_unique<SimDriver>(world_->coordinator(r), completions_, chance(70)));
    }
    for (int r = 0; r < world_->size(); ++r)
      for (size_t t = 0; t < threads_; ++t) start_thread(r, t);
    go([this] { return threads_left_ == 0 && settled(); });
    if (trace_) say_what_waits();
    check();
    stop();
  }

 private:
  using Kind = Step::Kind;

  bool chance(int percent) { return static_cast<int>(random_() % 100) < percent; }
  size_t pick(size_t low, size_t high) { return low + random_() % (high - low + 1); }
  template <typename T>
  T& any(std::vector<T>& list) {
    return list[pick(0, list.size() - 1)];
  }

  // --- the plan ---

  void plan_settings(uint64_t seed) {
    Settings settings;
    settings.deterministic = chance(10);
    settings.fusion_buffer_bytes = pick(1, 8) * 1024;
    settings.fusion_operation_bytes = pick(0, 4) * 1024;
    settings.queue_operations = chance(20) ? pick(1, 10) : 100'000;
    settings.stall_warning = 0ms;
    world_ = std::make_unique<SimWorld>(seed, std::vector<Settings>(chance(75) ? pick(1, 5) : pick(6, 16), settings));
    if (trace_) world_->note = [this](const std::string& event) { note(event); };
    scheduler_ = std::make_unique<Scheduler>(random_);
    threads_ = chance(60) ? 1 : pick(2, 3);
    network_share_ = static_cast<unsigned>(pick(2, 40));
    with_device_ = chance(60);
    with_names_ = chance(50);
    with_joins_ = chance(30);
  }

  void plan_groups() {
    const auto ranks = static_cast<size_t>(world_->size());
    const bool ring = ranks > 2 && chance(15);
    const size_t count = ring ? ranks : pick(1, 6);
    for (size_t g = 0; g < count; ++g) {
      Group& group = groups_.emplace_back();
      group.name = "g" + std::to_string(g);
      const size_t form = pick(0, 9);
      if (ring) {
        group.members = {static_cast<int>(g), static_cast<int>((g + 1) % ranks)};
      } else if (g > 0 && form < 2) {  // twins
        group.members = groups_[pick(0, g - 1)].members;
      } else if (g > 0 && form < 4) {  // nested
        const std::vector<int> outer = groups_[pick(0, g - 1)].members;
        for (const int rank : outer)
          if (chance(60)) group.members.push_back(rank);
      } else {
        for (size_t r = 0; r < ranks; ++r)
          if (chance(60)) group.members.push_back(static_cast<int>(r));
      }
      if (group.members.empty() || (form == 9 && !ring)) {
        group.members.resize(ranks);
        for (size_t r = 0; r < ranks; ++r) group.members[r] = static_cast<int>(r);
      }
      std::shuffle(group.members.begin(), group.members.end(), random_);
      group.handles.resize(group.members.size());
      group.operations = ranks > 5 ? pick(1, 20) : pick(1, 50);
    }
  }

  void plan_trouble() {
    const Trouble kinds[] = {Trouble::kAbsent,  Trouble::kAbsent, Trouble::kDies,  Trouble::kDies,
                             Trouble::kStopped, Trouble::kLeaves, Trouble::kAborts};
    Group& group = any(groups_);
    if (!chance(35) || group.members.size() < 2) {
      shares_memory_ = threads_ == 1 && chance(40);  // in two threads it would be the program's race
      return;
    }
    trouble_ = kinds[pick(0, 6)];
    target_ = static_cast<size_t>(&group - groups_.data());
    victim_ = any(group.members);
    trouble_at_ = pick(0, group.operations);  // of the target's steps
    trouble_step_ = pick(0, 4000);            // of the scheduler's steps
    const bool whole_rank = trouble_ == Trouble::kDies || trouble_ == Trouble::kStopped;
    for (Group& g : groups_) g.affected = whole_rank ? member_of(g, victim_) >= 0 : &g == &group;
    // Whoever leaves announces it in the rounds, so that one who waits for a message of his has only the time-out.
    if (trouble_ != Trouble::kDies && trouble_ != Trouble::kAborts) timeout_ = milliseconds(pick(1000, 2000));
    if (trouble_ == Trouble::kAbsent && chance(50)) {
      waits_at_end_ = true;
      timeout_ = kLongTimeout;
    }
    // The first sort is over before any time-out; the second outlasts them all.
    stop_for_ = chance(50) ? timeout_ / 4 : timeout_ * 3;
  }

  static int member_of(const Group& group, int rank) {
    const auto it = std::find(group.members.begin(), group.members.end(), rank);
    return it == group.members.end() ? -1 : static_cast<int>(it - group.members.begin());
  }

  void plan_steps() {
    std::vector<size_t> active;
    size_t next = 0;
    while (next < groups_.size() || !active.empty()) {
      if (next < groups_.size() && (active.empty() || chance(20))) {
        steps_.push_back({.kind = Kind::kMake, .group = next});
        groups_[next].steps_left = groups_[next].operations;
        active.push_back(next++);
        continue;
      }
      const size_t at = pick(0, active.size() - 1);
      const size_t number = active[at];
      Group& group = groups_[number];
      if (group.steps_left-- > 0) {
        plan_join(number);
        plan_operation(number);
        continue;
      }
      if (group.join_left > 0) end_join(number);
      steps_.push_back({.kind = Kind::kDestroy, .group = number});
      active.erase(active.begin() + static_cast<std::ptrdiff_t>(at));
    }
    for (Step& step : steps_) step.calls.resize(groups_[step.group].members.size());
  }

  // From time to time members stop one after the other, until all have joined.
  void plan_join(size_t number) {
    Group& group = groups_[number];
    const size_t size = group.members.size();
    if (group.join_left == 0 && with_joins_ && !shares_memory_ && size > 1 && chance(10)) {
      group.join_left = pick(1, 8);
      group.joined.assign(size, false);
    }
    if (group.join_left == 0) return;
    if (--group.join_left == 0) return end_join(number);
    const size_t member = pick(0, size - 1);
    const auto others = static_cast<size_t>(std::count(group.joined.begin(), group.joined.end(), false));
    if (chance(50) && others > 1) group.joined[member] = true;
  }

  void end_join(size_t number) {
    groups_[number].join_left = 0;
    groups_[number].joined.clear();
    steps_.push_back({.kind = Kind::kJoin, .group = number});
  }

  bool is_absent(const Step& step, int member) const {
    return !step.absent.empty() && step.absent[static_cast<size_t>(member)];
  }

  size_t new_buffer(size_t size) {
    Buffer& buffer = buffers_.emplace_back();
    for (int r = 0; r < world_->size(); ++r) {
      auto& values = buffer.first.emplace_back(size);
      for (int64_t& value : values) value = static_cast<int64_t>(random_() % 1000);
    }
    buffer.values = buffer.first;
    if (with_device_ && chance(40)) buffer.device = DeviceKind::kCuda;
    return buffers_.size() - 1;
  }

  // A tensor that has been used before, and may still be in flight, or a new one.
  size_t choose_buffer(size_t group) {
    if (chance(25)) {
      std::vector<size_t> known;
      for (size_t b = 0; b < buffers_.size(); ++b)
        if (!buffers_[b].own && (shares_memory_ || buffers_[b].group == group)) known.push_back(b);
      if (!known.empty()) return any(known);
    }
    const size_t sizes[] = {0, 1, 60, 60, pick(2, 100), pick(100, 200), pick(200, 1000)};  // equal ones make runs
    const size_t made = new_buffer(sizes[pick(0, 6)]);
    buffers_[made].group = group;
    return made;
  }

  void plan_operation(size_t number) {
    Group& group = groups_[number];
    const size_t size = group.members.size();
    Step step{.kind = Kind::kCollective, .group = number};
    Descriptor& d = step.descriptor;
    const bool some_joined = std::count(group.joined.begin(), group.joined.end(), true) > 0;
    if (size > 1 && group.joined.empty() && chance(15)) return plan_message(number);
    if (some_joined) step.absent = group.joined;
    // A name comes again later than a window is long, so that it is never in flight twice.
    if (with_names_ && chance(50)) {
      step.name = "n" + std::to_string(waits_at_end_ ? group.named : group.named % 30);
      ++group.named;
    }
    const OpKind kinds[] = {OpKind::kAllReduce, OpKind::kAllReduce, OpKind::kBroadcast,
                            OpKind::kReduce,    OpKind::kBarrier,   OpKind::kGatherVariable};
    d.kind = kinds[pick(0, 5)];
    if (size > 1 && !some_joined && chance(4)) step.deviant = static_cast<int>(pick(0, size - 1));
    if (d.kind == OpKind::kGatherVariable) {
      d = sim::VariableGather("").descriptor;
      step.buffer = new_buffer(0);
    } else {
      d.dtype = DType::kInt64;
      if (is_reduction(d.kind)) d.reduce_op = chance(80) ? ReduceOp::kSum : ReduceOp::kMax;
      if (d.kind == OpKind::kBroadcast || d.kind == OpKind::kReduce) d.root = static_cast<int32_t>(pick(0, size - 1));
      const size_t largest = chance(50) ? 100 : 1000;
      step.buffer = d.kind == OpKind::kBarrier ? new_buffer(0)
                    : step.name.empty()        ? choose_buffer(number)
                                               : new_buffer(pick(0, largest));
      buffers_[step.buffer].own = !step.name.empty();
      d.count = buffers_[step.buffer].first.front().size();
      d.equal_hash = mix(d.count);
    }
    d.device = buffers_[step.buffer].device;
    step.senseless = some_joined && d.root >= 0 && is_absent(step, d.root);
    steps_.push_back(std::move(step));
  }

  void plan_message(size_t number) {
    const size_t size = groups_[number].members.size();
    Step step{.kind = Kind::kMessage, .group = number};
    step.source = static_cast<int>(pick(0, size - 1));
    step.target = static_cast<int>((static_cast<size_t>(step.source) + pick(1, size - 1)) % size);
    step.any_source = chance(30);
    // Any source takes whatever comes first with the tag: one message has it.
    step.tag = step.any_source ? 100 + static_cast<int>(steps_.size()) : static_cast<int>(pick(0, 2));
    step.buffer = choose_buffer(number);
    // Two messages on one tensor are not kept apart, by no backend.
    if (std::exchange(buffers_[step.buffer].had_message, true)) {
      step.buffer = new_buffer(pick(0, 300));
      buffers_[step.buffer].group = number;
      buffers_[step.buffer].had_message = true;
    }
    step.descriptor.dtype = DType::kInt64;
    step.descriptor.count = buffers_[step.buffer].first.front().size();
    step.descriptor.device = buffers_[step.buffer].device;
    steps_.push_back(std::move(step));
  }

  // What every buffer holds after every step.
  void compute() {
    auto values = std::vector<std::vector<std::vector<int64_t>>>();
    for (const Buffer& buffer : buffers_) values.push_back(buffer.first);
    for (Step& step : steps_) {
      const Group& group = groups_[step.group];
      const auto at = [&](int member) -> std::vector<int64_t>& {
        return values[step.buffer][static_cast<size_t>(group.members[static_cast<size_t>(member)])];
      };
      const auto size = static_cast<int>(group.members.size());
      if (step.kind == Kind::kMessage) at(step.target) = at(step.source);
      const Descriptor& d = step.descriptor;
      if (step.kind == Kind::kCollective && step.deviant < 0 && !step.senseless && d.kind != OpKind::kGatherVariable) {
        int first = 0;
        while (is_absent(step, first)) ++first;
        std::vector<int64_t> result = at(d.kind == OpKind::kBroadcast ? d.root : first);
        for (int m = first + 1; m < size && is_reduction(d.kind); ++m) {
          for (size_t i = 0; i < result.size() && !is_absent(step, m); ++i) {
            const int64_t other = at(m)[i];
            result[i] = d.reduce_op == ReduceOp::kSum ? result[i] + other : std::max(result[i], other);
          }
        }
        for (int m = 0; m < size; ++m)
          if (d.kind != OpKind::kBarrier && (d.kind != OpKind::kReduce || m == d.root) && !is_absent(step, m))
            at(m) = result;
      }
      if (step.kind != Kind::kCollective && step.kind != Kind::kMessage) continue;
      for (int m = 0; m < size; ++m) step.after.push_back(at(m));
    }
  }

  // --- the run ---

  // A rank's steps in the common order, cut into windows: inside one, groups may change places, and only at its end
  // does the thread wait, for anything before it. So no rank waits for what comes after something it withholds.
  std::vector<std::vector<size_t>> agenda(int rank, size_t thread) {
    std::vector<std::vector<size_t>> windows(1);
    std::set<size_t> joins;  // groups in which this rank has joined
    size_t left = pick(1, 10);
    for (size_t s = 0; s < steps_.size(); ++s) {
      const Step& step = steps_[s];
      const int member = member_of(groups_[step.group], rank);
      if (step.group % threads_ != thread || member < 0) continue;
      if (step.kind == Kind::kMessage && member != step.source && member != step.target) continue;
      size_t entry = s;
      if (is_absent(step, member)) {
        if (!joins.insert(step.group).second) continue;
        entry = s | kJoinsHere;
      }
      if (step.kind == Kind::kJoin) joins.erase(step.group);
      const bool alone = step.kind == Kind::kDestroy;
      if (alone || left == 0) {
        windows.emplace_back();
        left = chance(40) ? 1 : pick(1, 25);
      }
      windows.back().push_back(entry);
      left = alone ? 0 : left - 1;
    }
    // Whoever stays away does so from some step on: else others would wait for an earlier one of his, of which the
    // first to give up knows nothing.
    const bool in_order = trouble_ != Trouble::kNone && rank == victim_;
    for (auto& window : windows) {
      if (shares_memory_) {
        if (!in_order) move_named(window);
        continue;
      }
      std::vector<size_t> mixed;
      while (mixed.size() < window.size()) {  // the first one left of a group chosen at random
        std::vector<size_t> groups;
        for (const size_t s : window)
          if (std::find(mixed.begin(), mixed.end(), s) == mixed.end()) groups.push_back(step_at(s).group);
        const size_t group = any(groups);
        for (const size_t s : window) {
          if (step_at(s).group != group || std::find(mixed.begin(), mixed.end(), s) != mixed.end()) continue;
          mixed.push_back(s);
          break;
        }
      }
      window = mixed;
      if (!in_order) move_named(window);
    }
    return windows;
  }

  // Operations with a name change places inside a window with anything but what makes their group, or joins.
  void move_named(std::vector<size_t>& window) {
    for (size_t moves = window.size(); moves > 0; --moves) {
      const size_t from = pick(0, window.size() - 1);
      const size_t entry = window[from];
      if (step_at(entry).name.empty() || (entry & kJoinsHere) != 0) continue;
      size_t low = 0;
      bool joins = false;
      for (size_t i = 0; i < window.size(); ++i) {
        const Step& other = step_at(window[i]);
        if (other.group != step_at(entry).group) continue;
        if (other.kind == Kind::kMake) low = i + 1;
        joins = joins || other.kind == Kind::kJoin || (window[i] & kJoinsHere) != 0;
      }
      if (joins) continue;
      window.erase(window.begin() + static_cast<std::ptrdiff_t>(from));
      window.insert(window.begin() + static_cast<std::ptrdiff_t>(pick(std::min(low, window.size()), window.size())),
                    entry);
    }
  }

  // In an agenda: not the step, but the place from which on the rank has joined.
  static constexpr size_t kJoinsHere = size_t{1} << 62;
  Step& step_at(size_t entry) { return steps_[entry & ~kJoinsHere]; }
  // The step in which all who are absent from this one have joined.
  Step& join_after(size_t entry) {
    size_t s = entry & ~kJoinsHere;
    const size_t group = steps_[s].group;
    while (steps_[s].kind != Kind::kJoin || steps_[s].group != group) ++s;
    return steps_[s];
  }

  void start_thread(int rank, size_t thread) {
    ++threads_left_;
    if (is_victim_process(rank)) ++victims_threads_;
    scheduler_->spawn(rank, "thread " + std::to_string(thread), [this, rank, windows = agenda(rank, thread)] {
      std::vector<OperationPtr> waiting;
      for (const auto& window : windows) {
        const bool burst = chance(30);
        for (const size_t s : window) {
          if (!burst) pass_time();
          if ((s & kJoinsHere) != 0) {
            take_step(rank, join_after(s));  // what it waits for comes later, in its own place
            continue;
          }
          wait_for_name(rank, steps_[s]);
          if (OperationPtr call = take_step(rank, steps_[s])) waiting.push_back(std::move(call));
        }
        if (waits_at_end_) continue;
        std::shuffle(waiting.begin(), waiting.end(), random_);
        for (size_t count = chance(50) ? waiting.size() : pick(0, waiting.size()); count > 0; --count) {
          wait(rank, waiting.back());
          waiting.pop_back();
        }
      }
      for (const OperationPtr& call : waiting) wait(rank, call);
      for (const auto& window : windows) {
        for (const size_t s : window) {
          const Group& group = groups_[step_at(s).group];
          const GroupPtr& handle = group.handles[static_cast<size_t>(member_of(group, rank))];
          if (step_at(s).kind == Kind::kDestroy && handle && waits_at_end_) destroy(rank, handle);
        }
      }
      --threads_left_;
      if (is_victim_process(rank)) --victims_threads_;
    });
  }
  bool is_victim_process(int rank) const { return trouble_ == Trouble::kDies && rank == victim_; }

  void pass_time() {
    if (chance(10)) scheduler_->sleep_about(std::chrono::microseconds(pick(1, 5000)));
    else if (chance(50)) scheduler_->yield();
  }

  SimDriver& driver(int rank) { return *drivers_[static_cast<size_t>(rank)]; }

  // What this rank has in flight under the step's name, from an earlier window.
  void wait_for_name(int rank, const Step& step) {
    if (step.name.empty() || waits_at_end_) return;
    const auto member = static_cast<size_t>(member_of(groups_[step.group], rank));
    for (const Step* other = steps_.data(); other != &step; ++other)
      if (other->group == step.group && other->name == step.name && other->calls[member])
        wait(rank, other->calls[member]);
  }

  void wait(int rank, const OperationPtr& call) {
    const auto done = [&] { return call->done(); };
    if (chance(10))
      driver(rank).wait_until(done, scheduler_->now() + milliseconds(pick(0, 5)));  // gives up waiting only
    driver(rank).wait_until(done, TimePoint::max());
  }

  OperationPtr take_step(int rank, Step& step) {
    Group& group = groups_[step.group];
    const int member = member_of(group, rank);
    GroupPtr& handle = group.handles[static_cast<size_t>(member)];
    const bool at_fault = trouble_ != Trouble::kNone && step.group == target_ && rank == victim_;
    const size_t number = at_fault ? target_steps_++ : 0;
    if (at_fault && trouble_ == Trouble::kAbsent && number >= trouble_at_) {
      if (!handle || step.kind != Kind::kDestroy) return nullptr;  // it never comes again, or never came
    }
    if (step.kind == Kind::kJoin && step.calls[static_cast<size_t>(member)])
      return step.calls[static_cast<size_t>(member)];
    switch (step.kind) {
      case Kind::kMake:
        if (group.made == nullptr) group.made = &world_->begin_group(group.name, group.members);
        say(rank, [&] { return "makes " + group.name; });
        handle = world_->join_group(*group.made, member);
        return nullptr;
      case Kind::kDestroy:
        if (!waits_at_end_) destroy(rank, handle);
        return nullptr;
      default: break;
    }
    if (at_fault && number == trouble_at_ + 1 && trouble_ == Trouble::kLeaves) leave(rank, handle);
    if (at_fault && number == trouble_at_ + 1 && trouble_ == Trouble::kAborts) {
      say(rank, [&] { return "aborts " + group.name; });
      world_->coordinator(rank).post([handle] {
        handle->give_up(std::make_shared<const OperationError>(
            OperationError{ErrorKind::kAborted, handle->describe() + ": aborted on this rank"}));
      });
      driver(rank).wake();
    }
    OperationPtr call =
        step.kind == Kind::kMessage ? make_message(step, member, rank) : make_collective(step, member, rank);
    call->name = step.name;
    call->submitted = scheduler_->now();
    if (group.affected && timeout_ > 0ms) call->deadline = call->submitted + timeout_;
    step.calls[static_cast<size_t>(member)] = call;
    last_submission_ = call->submitted;
    say(rank, [&] {
      return "submits " + (call->name.empty() ? "" : call->name + ": ") + call->describe() + " to " + group.name;
    });
    world_->coordinator(rank).submit(handle, call);
    driver(rank).wake();
    driver(rank).pace();
    return call;
  }

  void leave(int rank, const GroupPtr& handle) {
    say(rank, [&] { return "leaves " + handle->info().name; });
    world_->coordinator(rank).post([handle] { handle->leave(); });
    driver(rank).wake();
  }

  // As destroy_process_group does: waits, bounded, for what is unfinished.
  void destroy(int rank, const GroupPtr& handle) {
    driver(rank).wait_until([&] { return !handle->busy(); }, scheduler_->now() + 10s);
    if (!handle->leaving()) leave(rank, handle);
  }

  // What a member brings to a gather; of any length, also none.
  std::string text_of(const Step& step, size_t member) const {
    const uint64_t bits = mix(static_cast<uint64_t>(&step - steps_.data()) * 64 + member);
    return std::string(bits % 5 == 0 ? 0 : bits % 300, static_cast<char>('a' + member));
  }

  OperationPtr make_collective(const Step& step, int member, int rank) {
    const bool gathers = step.descriptor.kind == OpKind::kGatherVariable;
    OperationPtr call;
    if (step.kind == Kind::kJoin) {
      call = std::make_shared<Call>();
      call->descriptor.kind = OpKind::kJoin;
      call->joined_at = std::chrono::nanoseconds(scheduler_->now().time_since_epoch()).count();
      return call;
    }
    if (gathers) call = std::make_shared<GatherCall>(text_of(step, static_cast<size_t>(member)));
    else call = std::make_shared<Call>();
    Descriptor& d = call->descriptor;
    d = step.descriptor;
    if (step.deviant == member) d.equal_hash ^= 1;
    if (d.kind == OpKind::kBarrier || gathers) return call;
    const bool root = d.root == member;
    if (d.kind != OpKind::kBroadcast || root) use(*call, step, rank, call->inputs);
    const bool writes = d.kind == OpKind::kAllReduce || (d.kind == OpKind::kBroadcast ? !root : root);
    if (writes) use(*call, step, rank, call->outputs);
    add_range(*call, step, rank, writes);
    return call;
  }

  OperationPtr make_message(const Step& step, int member, int rank) {
    auto call = std::make_shared<Call>();
    const bool sends = member == step.source;
    call->descriptor = step.descriptor;
    call->descriptor.kind = sends ? OpKind::kSend : OpKind::kRecv;
    call->peer = sends ? step.target : step.any_source ? -1 : step.source;
    call->tag = step.tag;
    const int other = groups_[step.group].members[static_cast<size_t>(sends ? step.target : step.source)];
    call->peer_text = (sends ? " to rank " : " from rank ") + std::to_string(other);
    use(*call, step, rank, sends ? call->inputs : call->outputs);
    add_range(*call, step, rank, !sends);
    return call;
  }

  std::vector<int64_t>& memory(const Step& step, int rank) {
    return buffers_[step.buffer].values[static_cast<size_t>(rank)];
  }
  void use(const Operation& call, const Step& step, int rank, std::vector<Segment>& segments) {
    segments.push_back(
        {reinterpret_cast<std::byte*>(memory(step, rank).data()), static_cast<int64_t>(call.descriptor.count)});
  }
  void add_range(Operation& call, const Step& step, int rank, bool writes) {
    const auto begin = reinterpret_cast<uintptr_t>(memory(step, rank).data());
    call.ranges.push_back({begin, begin + memory(step, rank).size() * sizeof(int64_t), writes});
  }

  // Goes on until `over`, and puts the trouble in on the way.
  void go(const std::function<bool()>& over) {
    const TimePoint limit = scheduler_->now() + 40s;  // nothing that ends takes as long
    const auto outside = [this] { return make_trouble() || world_->deliver_one(); };
    const auto resting = [this] {
      for (int r = 0; r < world_->size(); ++r) {
        if (is_victim_process(r) || r == stopped_) continue;
        require(!driver(r).unattended(), "rank " + std::to_string(r) + " sleeps with work outstanding, nobody drives");
      }
    };
    scheduler_->run(over, limit, outside, network_share_, resting);
  }

  // Whether anything has happened.
  bool make_trouble() {
    if (trouble_ == Trouble::kDies && !dead_since_ && scheduler_->steps() >= trouble_step_) {
      note("rank " + std::to_string(victim_) + " dies");
      scheduler_->stop(victim_);
      world_->cut_off(victim_);
      dead_since_ = scheduler_->now();
      threads_left_ -= std::exchange(victims_threads_, 0);
      return true;
    }
    if (dead_since_ && !death_known_ && scheduler_->now() >= *dead_since_ + milliseconds(victim_ * 7 % 20)) {
      death_known_ = scheduler_->now();
      world_->set_dead(victim_);
    }
    if (trouble_ == Trouble::kStopped && !stopped_since_ && scheduler_->steps() >= trouble_step_) {
      note("rank " + std::to_string(victim_) + " is stopped");
      scheduler_->stop(victim_);
      stopped_ = victim_;
      stopped_since_ = scheduler_->now();
    }
    if (stopped_ >= 0 && scheduler_->now() >= *stopped_since_ + stop_for_) {
      note("rank " + std::to_string(victim_) + " goes on");
      scheduler_->go_on(victim_);
      stopped_ = -1;
      return true;
    }
    return false;
  }

  // The groups that nothing happened to have parted.
  bool settled() const {
    for (const Group& group : groups_)
      for (const GroupPtr& handle : group.handles)
        if (!group.affected && handle && !handle->closed()) return false;
    return stopped_ < 0;
  }

  void stop() {
    bool over = false;
    scheduler_->spawn(-1, "end", [&] {
      for (int r = 0; r < world_->size(); ++r)
        if (!is_victim_process(r)) driver(r).stop();
      over = true;
    });
    scheduler_->run([&] { return over; }, scheduler_->now() + 20s, [] { return false; }, 0, [] {});
    require(over, "the coordinator threads do not end");
  }

  // --- the checks ---

  void check() {
    for (const Step& step : steps_) {
      if (step.kind == Kind::kMake || step.kind == Kind::kDestroy) continue;
      for (size_t m = 0; m < step.calls.size(); ++m) check_call(step, m);
    }
    check_parted();
    check_named();
    require(threads_left_ == 0, "threads never end: " + joined(scheduler_->unfinished()));
    check_buffers();
    for (int r = 0; r < world_->size(); ++r) {
      if (is_victim_process(r)) continue;
      Coordinator& coordinator = world_->coordinator(r);
      const std::string rank = "rank " + std::to_string(r) + ": ";
      require(coordinator.unfinished() == 0, rank + "operations are counted as unfinished");
      require(coordinator.launch_order().empty(), rank + "device batches wait for their turn for ever");
      require(world_->on_device(r) == 0, rank + "the device is still at work");
      if (trouble_ == Trouble::kNone)
        require(coordinator.memory().empty(), rank + "memory of finished operations is still claimed");
    }
  }

  static std::string joined(const std::vector<std::string>& names) {
    std::string all;
    for (const std::string& name : names) all += (all.empty() ? "" : "; ") + name;
    return all;
  }

  void check_call(const Step& step, size_t member) {
    const Group& group = groups_[step.group];
    const int rank = group.members[member];
    const OperationPtr& call = step.calls[member];
    const bool meant = step.kind == Kind::kMessage
                           ? static_cast<int>(member) == step.source || static_cast<int>(member) == step.target
                           : !is_absent(step, static_cast<int>(member));
    if (is_victim_process(rank) || !meant) return;
    const std::string what = group.name + ", rank " + std::to_string(rank) + ", step " +
                             std::to_string(&step - steps_.data()) + (call ? " (" + call->describe() + ")" : "");
    if (!call) {
      const bool absent = trouble_ == Trouble::kAbsent && rank == victim_ && step.group == target_;
      require(absent, what + ": never submitted; its thread is stuck");
      return;
    }
    require(call->done(), what + ": never completes (deadlock)");
    check_time(group, rank, *call, what);
    const std::string text = call->error() ? call->error()->message : "";
    const bool wrong = step.deviant >= 0 || step.senseless;
    if (wrong && !group.affected) {
      require(!text.empty(), what + ": a disagreement went unnoticed");
      const std::string id = step.name.empty() ? std::to_string(call->sequence) : "'" + step.name + "'";
      require(text.find("disagree on collective " + id) != std::string::npos, what + ": text: " + text);
    } else if (!group.affected) {
      require(text.empty(), what + ": " + text);
    }
    if (text.empty()) {
      require(!wrong, what + ": a disagreement went unnoticed");
      check_pieces(step, *call, what);
      if (step.kind == Kind::kJoin) check_last(step, *call, what);
    } else {
      require(text.find("group '" + group.name + "'") != std::string::npos,
              what + ": does not name the group: " + text);
    }
  }

  // All members name the same one as the last to join.
  static void check_last(const Step& step, const Operation& call, const std::string& what) {
    require(call.peer >= 0 && call.peer < static_cast<int>(step.calls.size()), what + ": no last member");
    for (const OperationPtr& other : step.calls)
      if (other && other->done() && !other->error())
        require(other->peer == call.peer, what + ": not the same last member");
  }

  void check_time(const Group& group, int rank, const Operation& call, const std::string& what) const {
    if (!group.affected && waits_at_end_)
      require(ended_at(call) <= last_submission_ + kLongTimeout / 2, what + ": held up by a rank that is not in it");
    if (!group.affected || rank == victim_) return;
    const TimePoint ended = ended_at(call);
    if (call.deadline != TimePoint::max())
      require(ended <= call.deadline + 2500ms, what + ": ends long after its time-out");
    if (trouble_ == Trouble::kDies && death_known_)
      require(ended <= std::max(call.submitted, *death_known_) + 2000ms, what + ": ends long after the death");
  }
  static TimePoint ended_at(const Operation& call) {
    if (const auto* gather = dynamic_cast<const GatherCall*>(&call)) return gather->ended;
    return dynamic_cast<const Call&>(call).ended;
  }

  void check_pieces(const Step& step, const Operation& call, const std::string& what) const {
    const auto* gather = dynamic_cast<const GatherCall*>(&call);
    if (gather == nullptr) return;
    require(gather->pieces.size() == step.calls.size(), what + ": wrong number of pieces");
    for (size_t m = 0; m < gather->pieces.size(); ++m)
      require(gather->pieces[m] == (is_absent(step, static_cast<int>(m)) ? "" : text_of(step, m)),
              what + ": wrong piece of member " + std::to_string(m));
  }

  void check_parted() const {
    for (const Group& group : groups_) {
      for (const GroupPtr& handle : group.handles)
        if (!group.affected) require(handle && handle->closed(), group.name + ": all have left it, it is not closed");
    }
  }

  // Whoever learned of the trouble first names the culprit; others name who told them, or who waits for it elsewhere.
  void check_named() const {
    bool failed = false, named = false;
    std::string texts;
    for (const Step& step : steps_) {
      const Group& group = groups_[step.group];
      if (!group.affected || step.deviant >= 0 || step.senseless) continue;
      for (size_t m = 0; m < step.calls.size(); ++m) {
        const OperationPtr& call = step.calls[m];
        if (!call || !call->done() || !call->error() || group.members[m] == victim_) continue;
        const std::string& text = call->error()->message;
        failed = true;
        // Before a group is made, it is for whoever makes it to say who is missing.
        named = named || names(text, victim_) || text.find("communicator does not exist") != std::string::npos;
        // A rank that was stopped may go on before the time-out, and then does nothing wrong.
        named = named || (trouble_ == Trouble::kStopped &&
                          (stop_for_ < timeout_ || text.find("still on the way") != std::string::npos));
        if (texts.size() < 2000) texts += text + "\n";
      }
    }
    require(!failed || named, "nobody names rank " + std::to_string(victim_) + ":\n" + texts);
  }

  // Whether "rank 3" or "ranks 1, 3-5" or so, outside of the list of members, contains `rank`.
  static bool names(const std::string& text, int rank) {
    for (size_t at = text.find("rank"); at != std::string::npos; at = text.find("rank", at + 4)) {
      if (at > 0 && text[at - 1] == '(') continue;
      std::istringstream list(text.substr(at + (text.compare(at, 6, "ranks ") == 0 ? 6 : 5)));
      int first = 0, last = 0;
      while (list >> first) {
        last = first;
        if (list.peek() == '-') {
          list.get();
          list >> last;
        }
        if (first <= rank && rank <= last) return true;
        if (list.peek() != ',') break;
        list.get();
      }
    }
    return false;
  }

  // Each tensor holds what the last operation that succeeded on it left there.
  void check_buffers() const {
    for (size_t b = 0; b < buffers_.size(); ++b) {
      for (int r = 0; r < world_->size(); ++r) {
        if (is_victim_process(r)) continue;
        const std::vector<int64_t>* expected = &buffers_[b].first[static_cast<size_t>(r)];
        bool undefined = false;  // given up with the device at work on it
        for (const Step& step : steps_) {
          const int member = member_of(groups_[step.group], r);
          if (step.buffer != b || member < 0 || step.after.empty()) continue;
          const OperationPtr& call = step.calls[static_cast<size_t>(member)];
          if (call && call->done() && !call->error()) expected = &step.after[static_cast<size_t>(member)];
          undefined = undefined || (call && call->launched() && call->error());
        }
        require(undefined || buffers_[b].values[static_cast<size_t>(r)] == *expected,
                "rank " + std::to_string(r) + ": wrong values in buffer " + std::to_string(b));
      }
    }
  }

  // --- the schedule, where one is wanted ---

  void note(const std::string& event) const {
    if (!trace_) return;
    const std::chrono::duration<double, std::milli> time = scheduler_->now().time_since_epoch();
    std::printf("%9.3f ms  %s\n", time.count(), event.c_str());
  }
  template <typename Text>
  void say(int rank, Text text) const {
    if (trace_) note("rank " + std::to_string(rank) + " " + text());
  }

  void say_what_waits() {
    for (int r = 0; r < world_->size(); ++r) {
      for (const GroupPtr& group : world_->coordinator(r).groups()) {
        const OperationPtr oldest = group->oldest_unfinished();
        say(r, [&] {
          return "in " + group->info().name + (group->identity() == 0 ? ", not made," : "") + ": " +
                 (oldest ? "waits for " + numbered(*oldest) + (oldest->prepared ? "" : ", whose memory is in use")
                         : "waits for nothing");
        });
      }
    }
  }

  Random random_;
  const bool trace_;
  std::unique_ptr<SimWorld> world_;
  std::unique_ptr<Scheduler> scheduler_;
  sim::FiberPlatform::Completions completions_;
  std::vector<std::unique_ptr<SimDriver>> drivers_;
  std::vector<Group> groups_;
  std::vector<Step> steps_;
  std::vector<Buffer> buffers_;
  size_t threads_ = 1;
  size_t threads_left_ = 0;
  size_t victims_threads_ = 0;
  unsigned network_share_ = 8;
  bool with_device_ = false;
  bool with_names_ = false;
  bool with_joins_ = false;
  bool shares_memory_ = false;  // tensors are used in several groups
  bool waits_at_end_ = false;   // so that no thread stands between an absent rank and other groups
  TimePoint last_submission_{};

  Trouble trouble_ = Trouble::kNone;
  size_t target_ = 0;
  int victim_ = -1;
  size_t trouble_at_ = 0;
  size_t trouble_step_ = 0;
  size_t target_steps_ = 0;  // that the victim has come to
  milliseconds timeout_{0};
  milliseconds stop_for_{0};
  int stopped_ = -1;
  std::optional<TimePoint> stopped_since_, dead_since_, death_known_;
};

struct FaultName {
  const char* name;
  Fault fault;
};
constexpr FaultName kFaults[] = {
    {"no-second-phase", Fault::kNoSecondPhase},        {"proposals-repeat", Fault::kProposalsRepeat},
    {"no-validation", Fault::kNoValidation},           {"plans-from-local-state", Fault::kPlansFromLocalState},
    {"starts-out-of-order", Fault::kStartsOutOfOrder}, {"launch-waits", Fault::kLaunchWaits},
    {"nobody-drives", Fault::kNobodyDrives},
};

// What went wrong, or nothing.
std::optional<std::string> run(uint64_t seed, bool trace) {
  Program program(seed, trace);
  try {
    program.run();
  } catch (const std::exception& failure) {
    return failure.what();
  }
  return std::nullopt;
}

int usage() {
  std::fprintf(stderr, "simulate [FIRST_SEED [SEEDS]] [--fault NAME] [--trace]; faults:");
  for (const FaultName& known : kFaults) std::fprintf(stderr, " %s", known.name);
  std::fprintf(stderr, "\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t numbers[2] = {1, 200};
  bool trace = false;
  int given = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--trace") == 0) {
      trace = true;
    } else if (std::strcmp(argv[i], "--fault") == 0 && i + 1 < argc) {
      ++i;
      for (const FaultName& known : kFaults)
        if (std::strcmp(argv[i], known.name) == 0) planted_fault = known.fault;
      if (planted_fault == Fault::kNone) return usage();
    } else if (given < 2 && argv[i][0] != '-') {
      numbers[given++] = std::stoull(argv[i]);
    } else {
      return usage();
    }
  }
  const auto begin = std::chrono::steady_clock::now();
  for (uint64_t seed = numbers[0]; seed < numbers[0] + numbers[1]; ++seed) {
    const auto failure = run(seed, trace);
    if (!failure) continue;
    if (!trace) run(seed, true);
    std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), failure->c_str());
    return 1;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("%llu seeds from %llu: all programs ended as they should; %.0f seeds per second\n",
              static_cast<unsigned long long>(numbers[1]), static_cast<unsigned long long>(numbers[0]),
              static_cast<double>(numbers[1]) / seconds.count());
  return 0;
}
