// The engine's rules, one by one, on simulated ranks: each test fails when its rule is broken.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "coordinator/error_text.h"
#include "coordinator/half.h"
#include "coordinator/inline_payload.h"
#include "coordinator/rank_report.h"
#include "coordinator/reduce_kernels.h"
#include "transport/mpi/buffer_pool.h"
#include "transport/sim/sim_world.h"

namespace {

using namespace multicomm;
using sim::SimWorld;
using OperationRef = std::shared_ptr<sim::PlainOperation>;

#define REQUIRE(condition)                                                                                      \
  do {                                                                                                          \
    if (!(condition)) throw std::runtime_error(std::string(#condition) + ", line " + std::to_string(__LINE__)); \
  } while (false)

OperationRef all_reduce(std::vector<int64_t>& values, ReduceOp op = ReduceOp::kSum) {
  auto operation = std::make_shared<sim::PlainOperation>();
  sim::make_all_reduce(*operation, values, op);
  return operation;
}

OperationRef barrier() {
  auto operation = std::make_shared<sim::PlainOperation>();
  operation->descriptor.kind = OpKind::kBarrier;
  return operation;
}

// Ranks in lock step until nothing moves.
void settle(SimWorld& world) {
  for (int still = 0; still < 3;) {
    bool moved = world.deliver_one();
    for (int r = 0; r < world.size(); ++r) moved = world.step(r) || moved;
    still = moved || !world.quiet() ? 0 : still + 1;
  }
}

// In steps, as a coordinator sees it: what is asked at one look is answered by the next.
void pass_time(SimWorld& world, int seconds) {
  for (int i = 0; i < 10 * seconds; ++i) {
    world.advance_time(std::chrono::milliseconds(100));
    settle(world);
  }
}

std::vector<Settings> two(Settings settings = {}) { return {settings, settings}; }

struct Pair {
  explicit Pair(Settings settings = {}) : world(1, two(settings)), group(world.make_group("g", {0, 1})) {}
  void submit(int rank, const OperationRef& operation) {
    world.coordinator(rank).submit(group[static_cast<size_t>(rank)], operation);
  }
  SimWorld world;
  std::vector<GroupPtr> group;
};

void idle_group_sends_nothing() {
  Pair pair;
  settle(pair.world);
  REQUIRE(pair.group[0]->statistics().rounds == 0);
}

void small_operation_rides_in_the_record() {
  Pair pair;
  std::vector<int64_t> a(8, 1), b(8, 2);
  pair.submit(0, all_reduce(a));
  pair.submit(1, all_reduce(b));
  settle(pair.world);
  REQUIRE(a[7] == 3 && b[0] == 3);
  REQUIRE(pair.group[0]->statistics().inline_operations == 1 && pair.group[0]->statistics().batches == 0);
}

void what_piles_up_is_fused() {
  Pair pair;
  std::vector<std::vector<int64_t>> a(40, std::vector<int64_t>(200, 1)), b(40, std::vector<int64_t>(200, 2));
  for (auto& values : a) pair.submit(0, all_reduce(values));
  for (auto& values : b) pair.submit(1, all_reduce(values));
  settle(pair.world);
  const GroupStatistics s = pair.group[0]->statistics();
  REQUIRE(a[39][199] == 3);
  REQUIRE(s.rounds == 1 && s.batches == 1 && s.batched_operations == 40);
}

// Takes notes; its clock goes on whenever it is looked at.
struct Notes final : Trace {
  struct Over {
    uint64_t sequence;
    Trail trail;
    OperationEnd end;
    bool failed;
  };
  int64_t now() override { return ++time; }
  void round_over(const GroupState&, const RoundTrail& round) override { rounds.push_back(round); }
  void batch_over(const GroupState&, const BatchTrail& batch) override { batches.push_back(batch); }
  void operation_over(const GroupState&, const Operation& o, OperationEnd end, const OperationError* error) override {
    over.push_back({o.sequence, o.trail, end, error != nullptr});
  }
  int64_t time = 0;
  std::vector<RoundTrail> rounds;
  std::vector<BatchTrail> batches;
  std::vector<Over> over;
};

void trace_is_told_of_every_state_once() {
  Notes notes[2];
  Pair pair;
  for (int r = 0; r < 2; ++r) pair.world.coordinator(r).set_trace(&notes[r]);
  std::vector<std::vector<int64_t>> a(12, std::vector<int64_t>(200, 1)), b(12, std::vector<int64_t>(200, 2));
  std::vector<int64_t> small_a(2), small_b(2);
  pair.submit(0, all_reduce(small_a));
  for (auto& values : a) pair.submit(0, all_reduce(values));
  settle(pair.world);
  pair.submit(1, all_reduce(small_b));
  for (auto& values : b) pair.submit(1, all_reduce(values));
  settle(pair.world);
  for (const Notes& n : notes) {
    REQUIRE(n.over.size() == 13 && n.batches.size() == 1 && n.batches[0].operations == 12);
    REQUIRE(n.batches[0].bytes == 12 * 1600 && !n.batches[0].failed);
    for (size_t i = 0; i < n.over.size(); ++i) {
      const auto& [sequence, t, end, failed] = n.over[i];
      REQUIRE(sequence == i && end == OperationEnd::kDone && !failed && t.launched == 0);
      REQUIRE(t.offered > 0 && t.agreed > t.offered && t.round >= 0);
      const RoundTrail& round = n.rounds.at(static_cast<size_t>(t.round));
      REQUIRE(round.number == t.round && round.started <= t.offered && round.ended == t.agreed);
      if (i == 0) REQUIRE(t.batch == -1 && t.packing == 0);
      else REQUIRE(t.batch == n.batches[0].number && t.fused == 12 && t.packing > t.agreed && t.packed > t.packing);
    }
  }
  for (size_t i = 0; i < 13; ++i) REQUIRE(notes[0].over[i].trail.round == notes[1].over[i].trail.round);
}

void trace_is_told_of_what_does_not_end() {
  Notes notes;
  Pair pair;
  pair.world.coordinator(0).set_trace(&notes);
  std::vector<int64_t> a(2);
  const auto alone = all_reduce(a);
  alone->submitted = pair.world.now();
  pair.submit(0, alone);
  pass_time(pair.world, 3);
  REQUIRE(notes.over.size() == 1 && notes.over[0].end == OperationEnd::kWaiting && notes.over[0].trail.offered > 0);
  pair.group[0]->trace_unfinished();
  REQUIRE(notes.over.size() == 2 && notes.over[1].end == OperationEnd::kUnfinished);
  pair.world.coordinator(0).post([&] { pair.group[0]->give_up(aborted_error(pair.group[0]->info(), "enough")); });
  settle(pair.world);
  // Given up while its round is in flight, which may still come to its end: that is not told again.
  REQUIRE(notes.over.size() == 3 && notes.over[2].end == OperationEnd::kDone && notes.over[2].failed);
  pair.submit(1, all_reduce(a));
  settle(pair.world);
  REQUIRE(notes.over.size() == 3);
  pair.world.coordinator(0).set_trace(nullptr);
}

// Fewer descriptors than operations: a storm of equal ones is one round.
void equal_operations_are_one_run() {
  Pair pair;
  std::vector<std::vector<int64_t>> a(1000, std::vector<int64_t>(200, 1)), b(1000, std::vector<int64_t>(200, 2));
  for (size_t i = 0; i < 900; ++i) pair.submit(1, all_reduce(b[i]));
  for (auto& values : a) pair.submit(0, all_reduce(values));
  settle(pair.world);
  GroupStatistics s = pair.group[0]->statistics();
  REQUIRE(s.rounds == 1 && s.batches == 1 && s.batched_operations == 900 && a[899][127] == 3 && a[900][0] == 1);
  // Where one of them is another on the other side, those before it are run.
  for (size_t i = 900; i < 950; ++i) pair.submit(1, all_reduce(b[i]));
  const auto other = all_reduce(b[950], ReduceOp::kMax);
  pair.submit(1, other);
  for (size_t i = 951; i < 1000; ++i) pair.submit(1, all_reduce(b[i]));
  settle(pair.world);
  REQUIRE(other->error() && b[950][0] == 2 && a[950][0] == 1 && a[949][0] == 3 && a[951][0] == 3 && b[999][5] == 3);
  REQUIRE(other->error()->message.find("collective 950") != std::string::npos);
}

void deterministic_mode_fuses_nothing() {
  Settings settings;
  settings.deterministic = true;
  Pair pair(settings);
  std::vector<std::vector<int64_t>> a(6, std::vector<int64_t>(100, 1)), b(6, std::vector<int64_t>(100, 2));
  for (auto& values : a) pair.submit(0, all_reduce(values));
  for (auto& values : b) pair.submit(1, all_reduce(values));
  settle(pair.world);
  const GroupStatistics s = pair.group[0]->statistics();
  // 800 bytes each: every one fits a record of its own, so every one is inline, however many pile up.
  REQUIRE(s.inline_operations == 6 && s.batches == 0 && s.rounds == 6);
}

void partial_agreement_is_carried_on() {
  Pair pair;
  std::vector<std::vector<int64_t>> a(3, std::vector<int64_t>(200, 1)), b(3, std::vector<int64_t>(200, 2));
  std::vector<OperationRef> ops;
  for (auto& values : a) pair.submit(0, ops.emplace_back(all_reduce(values)));
  pair.submit(1, all_reduce(b[0]));
  settle(pair.world);
  REQUIRE(ops[0]->done() && !ops[1]->done());
  pair.submit(1, all_reduce(b[1]));
  pair.submit(1, all_reduce(b[2]));
  settle(pair.world);
  REQUIRE(ops[2]->done() && a[2][0] == 3);
}

void disagreement_fails_everywhere_and_touches_nothing() {
  Pair pair;
  std::vector<int64_t> a(8, 1), b(9, 2), c(4, 1), d(4, 2);
  const auto left = all_reduce(a), right = all_reduce(b);
  pair.submit(0, left);
  pair.submit(1, right);
  const auto next = all_reduce(c);
  pair.submit(0, next);
  pair.submit(1, all_reduce(d));
  settle(pair.world);
  REQUIRE(left->error() && right->error() && a[0] == 1 && b[0] == 2);
  for (const char* part : {"group 'g'", "ranks [0, 1]", "collective 0", "rank 0: all_reduce(SUM) of int64 [8]",
                           "rank 1: all_reduce(SUM) of int64 [9]"}) {
    REQUIRE(left->error()->message.find(part) != std::string::npos);
  }
  REQUIRE(!next->error() && c[0] == 3);  // the group goes on
}

void checksum_that_does_not_cancel_is_a_disagreement() {
  Pair pair;
  std::vector<int64_t> a(8, 1), b(8, 2);
  const auto left = all_reduce(a), right = all_reduce(b);
  left->descriptor.checksum = 5;
  right->descriptor.checksum = static_cast<uint64_t>(-4);
  pair.submit(0, left);
  pair.submit(1, right);
  settle(pair.world);
  REQUIRE(left->error() && right->error() && a[0] == 1);
}

void same_tensor_twice_means_twice() {
  Pair pair;
  std::vector<int64_t> a(8, 1), b(8, 1);
  for (int i = 0; i < 3; ++i) {
    pair.submit(0, all_reduce(a));
    pair.submit(1, all_reduce(b));
  }
  settle(pair.world);
  REQUIRE(a[0] == 8 && b[7] == 8);
}

void same_tensor_in_two_groups_is_serial() {
  SimWorld world(3, two());
  const auto first = world.make_group("g", {0, 1}), second = world.make_group("h", {1, 0});
  std::vector<int64_t> a(300, 1), b(300, 1);
  world.coordinator(0).submit(first[0], all_reduce(a));
  world.coordinator(1).submit(first[1], all_reduce(b));
  world.coordinator(0).submit(second[1], all_reduce(a));
  world.coordinator(1).submit(second[0], all_reduce(b));
  settle(world);
  REQUIRE(a[0] == 4 && b[299] == 4);
}

// The order of submission decides, though the second operation waits and the third could go ahead of it on some rank.
void waiting_operation_keeps_its_place() {
  SimWorld world(5, two());
  const auto first = world.make_group("g", {0, 1}), second = world.make_group("h", {0, 1});
  std::vector<int64_t> values[2] = {std::vector<int64_t>(300, 1), std::vector<int64_t>(300, 1)};
  OperationRef last[2];
  for (int r = 0; r < 2; ++r) {
    const auto at = static_cast<size_t>(r);
    world.coordinator(r).submit(first[at], all_reduce(values[r]));
    world.coordinator(r).submit(second[at], all_reduce(values[r], ReduceOp::kMax));
    last[r] = all_reduce(values[r]);
    world.coordinator(r).submit(first[at], last[r]);
    // One rank learns early that the first is done and looks at the groups in the other order.
    for (int i = 0; i < 8 * (1 - r); ++i) world.step(0);
  }
  settle(world);
  REQUIRE(last[0]->done() && last[1]->done() && values[0][0] == 4 && values[1][299] == 4);
  REQUIRE(world.coordinator(0).memory().empty());
}

void groups_do_not_wait_for_each_other() {
  SimWorld world(4, two());
  const auto stuck = world.make_group("stuck", {0, 1}), free = world.make_group("free", {0, 1});
  std::vector<int64_t> a(8, 1), b(8, 1), c(8, 1);
  const auto waiting = all_reduce(a), other = all_reduce(b);
  world.coordinator(0).submit(stuck[0], waiting);
  world.coordinator(0).submit(free[0], other);
  world.coordinator(1).submit(free[1], all_reduce(c));
  settle(world);
  REQUIRE(other->done() && !waiting->done());
}

// A rank that gave up still brings its real input, so that the late peer gets no garbage; its own tensor stays as it
// was.
void given_up_operation_keeps_its_input() {
  for (const size_t size : {size_t{8}, size_t{500}}) {
    Pair pair;
    std::vector<int64_t> a(size, 1), b(size, 2), c(size, 2);
    const auto early = all_reduce(a);
    early->deadline = pair.world.now() + std::chrono::seconds(1);
    pair.submit(0, early);
    settle(pair.world);
    pass_time(pair.world, 2);
    REQUIRE(early->done() && early->error() && early->error()->kind == ErrorKind::kTimeout);
    REQUIRE(early->error()->message.find("rank 1 has not submitted it") != std::string::npos);
    REQUIRE(a[0] == 1);
    a.assign(size, 50);  // its owner has been told, and goes on with it
    const auto late = all_reduce(b);
    pair.submit(1, late);
    settle(pair.world);
    REQUIRE(late->done() && !late->error() && b[0] == 3);
    REQUIRE(a[0] == 50);
    const auto after = all_reduce(c);  // and it learns that the group was given up, instead of waiting for ever
    pair.submit(1, after);
    settle(pair.world);
    REQUIRE(after->done() && after->error() && c[0] == 2);
    REQUIRE(after->error()->message.find("rank 0 gave this group up") != std::string::npos);
    REQUIRE(pair.world.coordinator(0).memory().empty());
  }
}

// What MPI may still write is not handed out again, and nobody waits for it: the peer may never come.
void memory_lost_to_the_transport_is_refused() {
  SimWorld world(7, two());
  const auto broken = world.make_group("broken", {0, 1}), other = world.make_group("other", {0, 1});
  std::vector<int64_t> a(500, 1), b(500, 2), c(500, 3);
  const auto lost = all_reduce(a);
  lost->deadline = world.now() + std::chrono::seconds(1);
  world.coordinator(0).submit(broken[0], lost);
  settle(world);
  lost->exposed = true;  // as the MPI plane marks it at its launch
  pass_time(world, 2);
  REQUIRE(lost->done() && lost->error());
  const auto again = all_reduce(a);
  world.coordinator(0).submit(other[0], again);
  REQUIRE(again->done() && again->error());
  REQUIRE(again->error()->message.find("Use another tensor") != std::string::npos);
  world.coordinator(1).submit(broken[1], all_reduce(b));  // the peer comes after all: MPI is done with it
  settle(world);
  for (const auto& [rank, values] : {std::pair{0, &a}, std::pair{1, &c}})
    world.coordinator(rank).submit(other[static_cast<size_t>(rank)], all_reduce(*values));
  settle(world);
  REQUIRE(a[0] == 4 && c[0] == 4);
  REQUIRE(world.coordinator(0).memory().empty());
}

// Two ranks that each hold what the other waits for would stand still.
void empty_buffer_pool_allocates() {
  BufferPool pool;
  std::vector<BufferPool::Block> taken;
  for (size_t i = 0; i < 200; ++i) {
    taken.push_back(pool.take(size_t{1} << 20));
    REQUIRE(taken.back() && taken.back().capacity >= size_t{1} << 20);
    std::memset(taken.back().data.get(), static_cast<int>(i), size_t{1} << 20);
  }
  for (size_t i = 0; i < taken.size(); ++i)  // each belongs to whoever took it
    REQUIRE(taken[i].data[(size_t{1} << 20) - 1] == static_cast<std::byte>(i));
  const std::byte* last = taken.back().data.get();
  pool.give(std::move(taken.back()));
  REQUIRE(pool.take(size_t{1} << 20).data.get() == last);  // and is used again afterwards
}

void variable_sizes_are_exchanged_in_order() {
  Pair pair;
  std::vector<int64_t> a(8, 1), b(8, 2), c(500, 1), d(500, 2);
  std::shared_ptr<sim::VariableGather> gathers[2][3];
  for (int r = 0; r < 2; ++r) {
    pair.submit(r, all_reduce(r == 0 ? a : b));
    for (int i = 0; i < 3; ++i) {
      const auto size = static_cast<size_t>(r == 0 ? i * 7 : 300 - i);  // empty on one rank at first
      gathers[r][i] = std::make_shared<sim::VariableGather>(std::string(size, static_cast<char>('a' + 3 * r + i)));
      pair.submit(r, gathers[r][i]);
      if (i == 1) pair.submit(r, all_reduce(r == 0 ? c : d));
    }
  }
  settle(pair.world);
  REQUIRE(a[0] == 3 && c[499] == 3);
  for (auto& of_rank : gathers) {
    for (int i = 0; i < 3; ++i) {
      REQUIRE(of_rank[i]->done() && !of_rank[i]->error());
      REQUIRE(of_rank[i]->pieces[0] == std::string(static_cast<size_t>(i * 7), static_cast<char>('a' + i)));
      REQUIRE(of_rank[i]->pieces[1] == std::string(static_cast<size_t>(300 - i), static_cast<char>('d' + i)));
    }
  }
  const GroupStatistics s = pair.group[0]->statistics();
  REQUIRE(s.batches == 4 && s.batched_operations == 4 && s.inline_operations == 1);
}

void variable_sizes_may_disagree_on_everything_else() {
  Pair pair;
  std::vector<int64_t> a(500, 1), b(500, 1), c(500, 2);
  const auto gather = std::make_shared<sim::VariableGather>("text");
  const auto sum = all_reduce(a);
  pair.submit(0, gather);
  pair.submit(1, sum);
  pair.submit(0, all_reduce(b));
  pair.submit(1, all_reduce(c));
  settle(pair.world);
  REQUIRE(gather->error() && sum->error() && a[0] == 1);
  REQUIRE(sum->error()->message.find("rank 0: all_gather of variable sizes") != std::string::npos);
  REQUIRE(b[0] == 3 && c[0] == 3);
}

// Has no data before it is prepared, like a staged tensor.
struct Staged final : sim::PlainOperation {
  explicit Staged(const sim::PlainOperation& like) : segment_(like.inputs.front()) {
    descriptor = like.descriptor;
    inputs = outputs = {{nullptr, segment_.count}};
    ranges = like.ranges;
  }
  void prepare() override { inputs = outputs = {segment_}; }

 private:
  const Segment segment_;
};

ErrorPtr some_error() {
  return std::make_shared<const OperationError>(OperationError{ErrorKind::kAborted, "given up in a test"});
}

// While the members exchange what they disagree on, the operation in question alone is still offered.
void giving_up_during_a_disagreement_spares_what_was_not_offered() {
  Pair pair;
  std::vector<int64_t> a(8, 1), b(9, 2), c(8, 1), d(8, 2), e(8, 1);
  const auto first = all_reduce(c), second = all_reduce(a);
  pair.submit(0, first);
  pair.submit(0, second);
  pair.submit(1, all_reduce(d));
  pair.submit(1, all_reduce(b));
  for (int i = 0; i < 100 && !first->done(); ++i) {
    pair.world.step(0);
    pair.world.step(1);
    pair.world.deliver_one();
  }
  REQUIRE(first->done() && !second->done());
  const auto staged = std::make_shared<Staged>(*all_reduce(e));
  pair.submit(0, staged);
  pair.world.coordinator(0).post([&] { pair.group[0]->give_up(some_error()); });
  pair.world.step(0);
  REQUIRE(second->done() && staged->done() && staged->error());
  settle(pair.world);
  REQUIRE(pair.world.coordinator(0).memory().empty() && pair.world.coordinator(1).memory().empty());
}

// A caller of an operation in flight whose group was left meanwhile still has its time-out.
void deadlines_hold_after_leaving() {
  Pair pair;
  std::vector<int64_t> a(500, 1), b(500, 2);
  const auto stuck = all_reduce(a);
  stuck->deadline = pair.world.now() + std::chrono::seconds(2);
  pair.submit(0, stuck);
  pair.submit(1, all_reduce(b));
  for (int i = 0; i < 100 && pair.group[0]->statistics().batches == 0; ++i) {
    pair.world.step(0);
    if (pair.group[1]->statistics().rounds == 0) pair.world.step(1);
    pair.world.deliver_one();
  }
  pair.world.coordinator(0).post([&] { pair.group[0]->leave(); });
  for (int i = 0; i < 40; ++i) {  // the other does nothing any more
    pair.world.advance_time(std::chrono::milliseconds(100));
    pair.world.step(0);
  }
  REQUIRE(stuck->done() && stuck->error() && a[0] == 1);
  REQUIRE(pair.world.coordinator(0).unfinished() == 0);
}

// A connection that breaks waits a while for the word of whose death it was; whoever leaves meanwhile does not.
void leaving_a_broken_group_ends_what_it_waits_for() {
  Pair pair;
  std::vector<int64_t> a(500, 1), b(500, 2);
  const auto left = all_reduce(a), stays = all_reduce(b);
  pair.world.break_batches("connection reset");
  pair.submit(0, left);
  pair.submit(1, stays);
  settle(pair.world);
  REQUIRE(!left->done() && !stays->done());
  pair.world.coordinator(0).post([&] { pair.group[0]->leave(); });
  settle(pair.world);
  REQUIRE(left->done() && left->error() && left->error()->message.find("connection reset") != std::string::npos);
  REQUIRE(!stays->done());
  pass_time(pair.world, 4);
  REQUIRE(stays->done() && stays->error() && a[0] == 1 && b[0] == 2);
  for (int r = 0; r < 2; ++r)
    REQUIRE(pair.world.coordinator(r).memory().empty() && pair.world.coordinator(r).unfinished() == 0);
}

// All have left while a batch is still in flight: the transport works on its memory until it ends.
void group_outlives_what_is_in_flight() {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SimWorld world(seed, two());
    const auto group = world.make_group("g", {0, 1});
    std::vector<int64_t> values[2] = {std::vector<int64_t>(500, 1), std::vector<int64_t>(500, 2)};
    std::weak_ptr<sim::PlainOperation> operations[2];
    for (int r = 0; r < 2; ++r) {
      const auto operation = all_reduce(values[r]);
      operations[r] = operation;
      world.coordinator(r).submit(group[static_cast<size_t>(r)], operation);
    }
    const auto launched = [&](int r) { return group[static_cast<size_t>(r)]->statistics().batches > 0; };
    for (int i = 0; i < 100 && !(launched(0) && launched(1)); ++i) {
      for (int r = 0; r < 2; ++r)
        if (!launched(r)) world.step(r);
      world.deliver_one();
    }
    for (int r = 0; r < 2; ++r) {
      world.coordinator(r).post([&, r] {
        group[static_cast<size_t>(r)]->give_up(some_error());
        group[static_cast<size_t>(r)]->leave();
      });
    }
    settle(world);
    for (int r = 0; r < 2; ++r) {
      REQUIRE(group[static_cast<size_t>(r)]->closed());
      REQUIRE(operations[r].expired());
      REQUIRE(world.coordinator(r).memory().empty() && world.coordinator(r).unfinished() == 0);
    }
  }
}

struct Faulty final : sim::PlainOperation {
  explicit Faulty(const sim::PlainOperation& like, bool at_start) : at_start_(at_start) {
    descriptor = like.descriptor;
    inputs = like.inputs;
    outputs = like.outputs;
    ranges = like.ranges;
  }
  void prepare() override {
    if (at_start_) throw std::runtime_error("no memory");
  }
  void finish() override { throw std::runtime_error("no such copy"); }

 private:
  bool at_start_;
};

void copy_that_fails_fails_its_operation_alone() {
  for (const size_t size : {size_t{8}, size_t{500}}) {
    Pair pair;
    std::vector<int64_t> a(size, 1), b(size, 2);
    const auto bad = std::make_shared<Faulty>(*all_reduce(a), false);
    const auto good = all_reduce(b);
    pair.submit(0, bad);
    pair.submit(1, good);
    settle(pair.world);
    REQUIRE(bad->error() && bad->error()->message.find("no such copy") != std::string::npos);
    REQUIRE(good->done() && !good->error());
    std::vector<int64_t> c(size, 1), d(size, 2);
    pair.submit(0, all_reduce(c));
    pair.submit(1, all_reduce(d));
    settle(pair.world);
    REQUIRE(c[0] == 3 && d[0] == 3);
    REQUIRE(pair.world.coordinator(0).memory().empty());
  }
}

void staging_that_fails_is_told_to_all() {
  Pair pair;
  std::vector<int64_t> a(8, 1), b(8, 2), c(8, 1), d(8, 2);
  pair.submit(0, all_reduce(a));  // offered with it, and good
  const auto bad = std::make_shared<Faulty>(*all_reduce(c), true);
  const auto peer = all_reduce(d);
  pair.submit(0, bad);
  pair.submit(1, all_reduce(b));
  pair.submit(1, peer);
  settle(pair.world);
  REQUIRE(b[0] == 3 && c[0] == 1 && d[0] == 2);
  REQUIRE(bad->error() && bad->error()->message.find("no memory") != std::string::npos);
  REQUIRE(peer->error() && peer->error()->message.find("rank 0 gave this group up") != std::string::npos);
  REQUIRE(pair.world.coordinator(0).memory().empty());
}

// Rank 1 works elsewhere, rank 2 sleeps, rank 3 is stopped: the warning and the time-out say so of each.
void missing_ranks_are_named_with_what_they_do() {
  Settings settings;
  settings.stall_warning = std::chrono::seconds(3);
  SimWorld world(9, {settings, settings, settings, settings});
  std::vector<std::string> warnings;
  world.coordinator(0).warn = [&](const std::string& text) { warnings.push_back(text); };
  world.coordinator(1).warn = [](const std::string&) {};
  const auto group = world.make_group("g", {0, 1, 2, 3}), other = world.make_group("h", {1, 2});
  std::vector<int64_t> values[4] = {{1}, {1}, {1}, {1}};
  for (int r = 0; r < 4; ++r) world.coordinator(r).submit(group[static_cast<size_t>(r)], all_reduce(values[r]));
  settle(world);
  REQUIRE(values[0][0] == 4);
  world.set_deaf(3);
  const auto late = all_reduce(values[0]);
  late->submitted = world.now();
  late->deadline = world.now() + std::chrono::seconds(8);
  world.coordinator(0).submit(group[0], late);
  std::vector<int64_t> elsewhere(7, 1);
  const auto blocked = all_reduce(elsewhere, ReduceOp::kMax);
  blocked->submitted = world.now();
  world.coordinator(1).submit(other[0], blocked);
  pass_time(world, 7);
  REQUIRE(!late->done());
  REQUIRE(warnings.size() == 1);
  pass_time(world, 2);
  REQUIRE(late->done() && warnings.size() == 1);
  for (const std::string& text : {warnings[0], late->error()->message}) {
    for (const char* part :
         {"rank 0: group 'g' (ranks [0, 1, 2, 3])", "collective 1, all_reduce(SUM) of int64 [1]",
          "ranks 1, 2 have not submitted it; rank 3 does not answer",
          "rank 1 has submitted 1 collective of this group; it waits in group 'h' (ranks [1, 2]) for collective 0, "
          "all_reduce(MAX) of int64 [7]",
          "rank 2 has submitted 1 collective of this group; it waits for no operation"}) {
      if (text.find(part) == std::string::npos) throw std::runtime_error(std::string(part) + " is not in: " + text);
    }
  }
}

// The groups of a dead rank fail soon, long before their time-outs; the others go on.
void death_of_a_member_ends_its_groups_only() {
  SimWorld world(10, {Settings{}, Settings{}, Settings{}});
  const auto all = world.make_group("all", {0, 1, 2}), pair = world.make_group("pair", {0, 1});
  std::vector<int64_t> a(3, 1), b(3, 1), c(500, 1), d(500, 1), e(3, 1);
  const OperationRef waiting[2] = {all_reduce(a), all_reduce(b)};
  for (int r = 0; r < 2; ++r) world.coordinator(r).submit(all[static_cast<size_t>(r)], waiting[r]);
  world.set_dead(2);
  pass_time(world, 3);
  for (const OperationRef& operation : waiting) {
    REQUIRE(operation->done() && operation->error());
    REQUIRE(operation->error()->message.find("the process of rank 2 has ended") != std::string::npos);
    REQUIRE(operation->error()->message.find("collective 0, all_reduce(SUM) of int64 [3]") != std::string::npos);
  }
  world.coordinator(0).submit(pair[0], all_reduce(c));
  world.coordinator(1).submit(pair[1], all_reduce(d));
  settle(world);
  REQUIRE(c[0] == 2 && d[499] == 2);
  const auto later = all_reduce(e);
  world.coordinator(0).submit(all[0], later);
  REQUIRE(later->done() && later->error());
}

struct Looker {
  explicit Looker(SimWorld& world, int rank = 0) : world(world), coordinator(world.coordinator(rank)) {}
  void take(bool stacks) {
    coordinator.post([this, stacks] {
      coordinator.pictures().take(stacks, [this](std::string text) { pictures.push_back(std::move(text)); });
    });
  }
  void require(std::initializer_list<const char*> parts) const {
    REQUIRE(!pictures.empty());
    for (const char* part : parts)
      if (pictures.back().find(part) == std::string::npos)
        throw std::runtime_error(std::string(part) + " is not in: " + pictures.back());
  }
  SimWorld& world;
  Coordinator& coordinator;
  std::vector<std::string> pictures;
};

// As above, but asked for: nothing has to be late. Rank 3 is stopped and rank 4 dead.
void picture_shows_all_ranks() {
  SimWorld world(11, std::vector<Settings>(5));
  const auto group = world.make_group("g", {0, 1, 2, 3}), other = world.make_group("h", {1, 2});
  settle(world);
  std::vector<int64_t> a(3, 1), b(7, 1), c(7, 1);
  const auto waiting = all_reduce(a), behind = all_reduce(a), elsewhere = all_reduce(b, ReduceOp::kMax);
  for (const auto& operation : {waiting, behind, elsewhere}) operation->submitted = world.now();
  world.coordinator(0).submit(group[0], waiting);
  world.coordinator(0).submit(group[0], behind);
  world.coordinator(1).submit(other[0], elsewhere);
  world.set_deaf(3);
  world.set_dead(4);
  Looker looker(world);
  looker.take(false);
  looker.take(false);  // two at once, each with its answers
  pass_time(world, 1);
  REQUIRE(looker.pictures.empty());  // it could still answer
  pass_time(world, 3);
  REQUIRE(looker.pictures.size() == 2 && looker.pictures[0] == looker.pictures[1]);
  looker.require({"what the 5 ranks of the job are doing, as told to rank 0\nrank 0\n",
                  "  group 'g' (ranks [0, 1, 2, 3]): 2 collectives submitted, 2 operations unfinished\n",
                  "    collective 0, all_reduce(SUM) of int64 [3], for ",
                  ": offered; ranks 1, 2 have not submitted it; rank 3 does not answer\nrank 1\n",
                  "  group 'h' (ranks [1, 2]): 1 collective submitted, 1 operation unfinished\n",
                  ": offered; rank 2 has not submitted it\nrank 2\n  waits for no operation of multicomm\n",
                  "rank 3\n  does not answer (stopped, cut off, or at the end of its program)\nrank 4\n  has died\n"});
  looker.take(false);
  world.coordinator(2).post(
      [&] { other[1]->give_up(std::make_shared<OperationError>(ErrorKind::kAborted, "enough")); });
  pass_time(world, 4);
  REQUIRE(looker.pictures.size() == 3);
}

// The stack comes from elsewhere, later or never; nobody waits for it for long.
void picture_does_not_wait_for_an_interpreter() {
  SimWorld world(12, two());
  int asked = 0;
  for (int r = 0; r < 2; ++r) world.coordinator(r).pictures().request_stack = [&] { ++asked; };
  Looker looker(world);
  looker.take(true);
  settle(world);
  REQUIRE(asked == 2 && looker.pictures.empty());
  world.coordinator(1).post([&] { world.coordinator(1).pictures().stack_came("main thread:\n  in train"); });
  pass_time(world, 1);
  looker.require({"rank 0\n  waits for no operation of multicomm\n  main thread: no Python stack within 0.5 s",
                  "rank 1\n  waits for no operation of multicomm\n  main thread:\n    in train\n"});
  // The interpreter that was asked in vain is not asked again before it has answered; its late answer is of use.
  looker.take(true);
  settle(world);
  world.advance_time(std::chrono::milliseconds(100));
  settle(world);
  REQUIRE(asked == 3);
  for (int r = 0; r < 2; ++r)
    world.coordinator(r).post([&world, r] { world.coordinator(r).pictures().stack_came("main thread: at last"); });
  pass_time(world, 1);
  looker.require({"rank 0\n  waits for no operation of multicomm\n  main thread: at last\nrank 1\n"});
}

void report_is_bounded_and_checked() {
  RankReport report;
  for (uint64_t i = 0; i < 50; ++i) {
    GroupReport group;
    group.identity = i + 1;
    group.submitted = 7 + i;
    group.unfinished = 1;
    group.name = std::string(1000, 'n');
    group.members = {9, 3, 4, 5};
    group.waiting = {{"collective 6, barrier", 1, 6, 0, false, Standing::kAgreed, std::chrono::milliseconds(1500)}};
    report.busy.push_back(group);
  }
  report.stack = std::string(1 << 20, 's');
  const std::string bytes = pack(report);
  REQUIRE(bytes.size() < 64 << 10);
  const RankReport back = unpack_report(bytes);
  REQUIRE(back.busy.size() == 32 && back.more_busy == 18 && back.idle.size() == 18);
  REQUIRE(back.busy[31].identity == 32 && (back.busy[0].members == std::vector<int>{3, 4, 5, 9}));
  REQUIRE(back.busy[0].name.find("... (600 more characters)") != std::string::npos);
  REQUIRE(back.busy[0].waiting[0].text == "collective 6, barrier" && back.busy[0].waiting[0].sequence == 6);
  REQUIRE(back.idle[17].identity == 50 && back.idle[17].submitted == 56);
  for (size_t size = 0; size < bytes.size(); size += 97) {
    bool refused = false;
    try {
      unpack_report(bytes.substr(0, size));
    } catch (const std::runtime_error&) {
      refused = true;
    }
    REQUIRE(refused);
  }
}

void leaving_with_peers_at_work_is_told() {
  Pair pair;
  std::vector<int64_t> a(8, 1);
  const auto waiting = all_reduce(a);
  pair.submit(0, waiting);
  pair.world.coordinator(1).post([&] { pair.group[1]->leave(); });
  settle(pair.world);
  REQUIRE(waiting->error() && waiting->error()->message.find("rank 1 has destroyed this group") != std::string::npos);
  REQUIRE(!pair.group[0]->closed());
  pair.world.coordinator(0).post([&] { pair.group[0]->leave(); });
  settle(pair.world);
  REQUIRE(pair.group[0]->closed() && pair.group[1]->closed());
}

void closed_group_refuses() {
  Pair pair;
  for (int r = 0; r < 2; ++r)
    pair.world.coordinator(r).post([&pair, r] { pair.group[static_cast<size_t>(r)]->leave(); });
  settle(pair.world);
  std::vector<int64_t> a(8, 1);
  const auto late = all_reduce(a);
  pair.submit(0, late);
  REQUIRE(late->done() && late->error() && late->error()->message.find("destroyed") != std::string::npos);
}

void barrier_waits_for_all() {
  Pair pair;
  const auto first = barrier();
  pair.submit(0, first);
  settle(pair.world);
  REQUIRE(!first->done());
  pair.submit(1, barrier());
  settle(pair.world);
  REQUIRE(first->done() && !first->error());
}

void combine_is_symmetric() {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
    const float values[] = {0.0f, -0.0f, 1.5f, -3.0f, std::numeric_limits<float>::infinity(), std::nanf("")};
    for (const float x : values) {
      for (const float y : values) {
        float a = x, b = y;
        reduce_into(DType::kFloat32, op, &a, &y, 1);
        reduce_into(DType::kFloat32, op, &b, &x, 1);
        REQUIRE((std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof(a)) == 0);
      }
    }
  }
}

void half_precision_round_trips() {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto h = static_cast<uint16_t>(bits);
    const float f = half_bits_to_float(h), g = bfloat_bits_to_float(h);
    REQUIRE(std::isnan(f) ? std::isnan(half_bits_to_float(float_to_half_bits(f))) : float_to_half_bits(f) == h);
    REQUIRE(std::isnan(g) ? std::isnan(bfloat_bits_to_float(float_to_bfloat_bits(g))) : float_to_bfloat_bits(g) == h);
  }
  REQUIRE(float_to_half_bits(65519.9f) == 0x7bff && float_to_half_bits(65520.0f) == 0x7c00);
  REQUIRE(float_to_half_bits(0x1p-25f) == 0 && float_to_half_bits(0x1.8p-25f) == 1);  // ties to even, then up
  REQUIRE(float_to_half_bits(1.0f + 0x1p-11f) == 0x3c00 && float_to_half_bits(1.0f + 0x1.8p-10f) == 0x3c02);
  REQUIRE(float_to_bfloat_bits(1.0f + 0x1p-8f) == 0x3f80 && float_to_bfloat_bits(1.0f + 0x1.8p-7f) == 0x3f82);
}

OperationRef named(std::vector<int64_t>& values, const std::string& name, ReduceOp op = ReduceOp::kSum) {
  auto operation = all_reduce(values, op);
  operation->name = name;
  return operation;
}

void names_match_in_any_order() {
  Pair pair;
  std::vector<int64_t> a(200, 1), b(200, 10), c(200, 2), d(200, 20), e(200, 100), f(200, 200);
  pair.submit(0, named(a, "first"));
  pair.submit(0, all_reduce(e));
  pair.submit(0, named(b, "second"));
  pair.submit(1, named(d, "second"));
  pair.submit(1, named(c, "first"));
  pair.submit(1, all_reduce(f));
  settle(pair.world);
  REQUIRE(a[199] == 3 && c[0] == 3 && b[0] == 30 && d[199] == 30 && e[0] == 300 && f[0] == 300);
}

// One step of a training loop: every name once, in an order of each rank's own.
void step_of_names(Pair& pair, std::vector<std::vector<int64_t>>& a, std::vector<std::vector<int64_t>>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    pair.submit(0, named(a[i], "gradient." + std::to_string(i)));
    const size_t back = a.size() - 1 - i;
    pair.submit(1, named(b[back], "gradient." + std::to_string(back)));
  }
  settle(pair.world);
}

void repeated_names_cost_one_round() {
  Pair pair;
  std::vector<std::vector<int64_t>> a(300, std::vector<int64_t>(20, 1)), b(300, std::vector<int64_t>(20, 1));
  step_of_names(pair, a, b);
  REQUIRE(a[0][0] == 2 && b[299][19] == 2);
  for (int step = 0; step < 3; ++step) {
    const GroupStatistics before = pair.group[0]->statistics();
    step_of_names(pair, a, b);
    const GroupStatistics after = pair.group[0]->statistics();
    REQUIRE(after.batches - before.batches == 1 && after.rounds - before.rounds == 1);
  }
  REQUIRE(a[7][7] == 16);
}

void more_names_than_slots() {
  Pair pair;
  const size_t count = 3 * kNameSlots;
  std::vector<std::vector<int64_t>> a(count, std::vector<int64_t>(1, 1)), b(count, std::vector<int64_t>(1, 2));
  for (int step = 0; step < 2; ++step) step_of_names(pair, a, b);
  for (size_t i = 0; i < count; ++i) REQUIRE(a[i][0] == 6 && b[i][0] == 6);
}

// One rank waits under more names than there are slots before the other comes with one of them.
void no_name_is_starved_of_a_slot() {
  Pair pair;
  const size_t count = 2 * kNameSlots;
  std::vector<std::vector<int64_t>> a(count, std::vector<int64_t>(1, 1));
  std::vector<OperationRef> calls;
  for (size_t i = 0; i < count; ++i) pair.submit(0, calls.emplace_back(named(a[i], "n" + std::to_string(i))));
  for (size_t i = 0; i < count; i += 97) {
    std::vector<int64_t> b(1, 5);
    const auto call = named(b, "n" + std::to_string(i));
    pair.submit(1, call);
    for (int looks = 0; looks < 1000 && !call->done(); ++looks) {
      pair.world.advance_time(std::chrono::milliseconds(1));
      settle(pair.world);
    }
    REQUIRE(call->done() && calls[i]->done() && b[0] == 6);
  }
}

void names_that_change_are_compared_again() {
  Pair pair;
  std::vector<int64_t> a(3, 1), b(3, 2);
  const auto send = [&](size_t left, size_t right) {
    a.assign(left, 1);
    b.assign(right, 2);
    const auto mine = named(a, "grows"), theirs = named(b, "grows");
    pair.submit(0, mine);
    pair.submit(1, theirs);
    settle(pair.world);
    REQUIRE(mine->done() && theirs->done());
    return std::pair(mine->error(), theirs->error());
  };
  REQUIRE(!send(3, 3).first && a[0] == 3);
  REQUIRE(!send(500, 500).first && a[499] == 3 && b[499] == 3);
  const auto [left, right] = send(500, 501);
  REQUIRE(left && right && a[0] == 1 && b[0] == 2);
  for (const char* part : {"disagree on collective 'grows'", "[500]", "[501]", "under the same name"})
    REQUIRE(left->message.find(part) != std::string::npos);
  REQUIRE(!send(500, 500).first && a[0] == 3);
}

void name_in_flight_twice_is_told_to_all() {
  Pair pair;
  std::vector<int64_t> a(3, 1), b(3, 1), c(3, 2), d(3, 2);
  const auto first = named(a, "x"), again = named(b, "x");
  pair.submit(0, first);
  pair.submit(0, again);
  settle(pair.world);
  const auto theirs = named(c, "x"), theirs_again = named(d, "x");
  pair.submit(1, theirs);
  settle(pair.world);
  REQUIRE(first->done() && !first->error() && theirs->done() && !theirs->error() && a[0] == 3);
  pair.submit(1, theirs_again);
  settle(pair.world);
  REQUIRE(again->error() && theirs_again->error() && b[0] == 1 && d[0] == 2);
  for (const auto& call : {again, theirs_again})
    REQUIRE(call->error()->message.find("again, while the one before it had not begun") != std::string::npos);
  const auto third = named(b, "x");
  pair.submit(0, third);
  pair.submit(1, named(d, "x"));
  settle(pair.world);
  REQUIRE(third->done() && !third->error() && b[0] == 3);
}

// Neither the round trips nor the processor are spent on asking whether the other has come.
void waiting_for_names_is_quiet() {
  Pair pair;
  std::vector<int64_t> a(3, 1), b(3, 2), c(3, 1), d(3, 2);
  pair.submit(0, named(a, "only 0"));
  pair.submit(1, named(b, "only 1"));
  for (int i = 0; i < 20'000; ++i) {  // 2 s
    pair.world.advance_time(std::chrono::microseconds(100));
    settle(pair.world);
  }
  REQUIRE(pair.group[0]->statistics().rounds < 2500);
  const auto late = named(c, "only 1");
  pair.submit(0, late);
  for (int i = 0; i < 50 && !late->done(); ++i) {
    pair.world.advance_time(std::chrono::microseconds(100));
    settle(pair.world);
  }
  REQUIRE(late->done());
}

void missing_name_is_reported() {
  Settings settings;
  settings.stall_warning = std::chrono::seconds(3);
  Pair pair(settings);
  std::vector<std::string> warnings;
  pair.world.coordinator(0).warn = [&](const std::string& text) { warnings.push_back(text); };
  std::vector<int64_t> a(3, 1), b(3, 1), c(3, 1);
  pair.submit(0, named(a, "layer.weight"));
  pair.submit(1, named(b, "layer.bias"));
  const auto late = named(c, "layer.bias");
  late->submitted = pair.world.now();
  pair.submit(0, late);
  pass_time(pair.world, 5);
  REQUIRE(late->done() && warnings.size() == 1);
  for (const char* part : {"collective 'layer.weight', all_reduce(SUM)", "rank 1 has not submitted it"})
    REQUIRE(warnings[0].find(part) != std::string::npos);
}

OperationRef join(int64_t at = 0) {
  auto operation = std::make_shared<sim::PlainOperation>();
  operation->joined_at = at;
  operation->descriptor.kind = OpKind::kJoin;
  return operation;
}

void joined_rank_takes_part_in_everything() {
  Settings settings;
  SimWorld world(1, {settings, settings, settings});
  const auto group = world.make_group("g", {0, 1, 2});
  const auto submit = [&](size_t rank, const OperationRef& operation) {
    world.coordinator(static_cast<int>(rank)).submit(group[rank], operation);
  };
  const auto joined = join(1);
  submit(1, joined);
  settle(world);
  for (const size_t size : {size_t{5}, size_t{2000}}) {  // in the record, and as a batch
    for (const std::string name : {"", "x", "x"}) {
      std::vector<int64_t> sum(size, 5), highest(size, -7), mean(size, 3);
      std::vector<int64_t> sum2(size, 6), highest2(size, -9), mean2(size, 5);
      submit(0, named(sum, name));
      submit(0, named(highest, name.empty() ? "" : name + ".max", ReduceOp::kMax));
      submit(2, named(highest2, name.empty() ? "" : name + ".max", ReduceOp::kMax));
      submit(2, named(sum2, name));
      if (name.empty()) settle(world);
      submit(0, named(mean, name.empty() ? "" : name + ".avg", ReduceOp::kAvg));
      submit(2, named(mean2, name.empty() ? "" : name + ".avg", ReduceOp::kAvg));
      settle(world);
      if (name.empty()) continue;  // exchanged above: they disagree, on purpose
      REQUIRE(sum[size - 1] == 11 && sum2[0] == 11 && highest[0] == -7 && highest2[size - 1] == -7);
    }
  }
  REQUIRE(!joined->done());
  const auto left = join(3), right = join(2);
  submit(2, right);
  settle(world);
  submit(0, left);
  settle(world);
  REQUIRE(joined->done() && left->done() && right->done());
  REQUIRE(joined->peer == 0 && left->peer == 0 && right->peer == 0);
  std::vector<int64_t> a(3, 1), b(3, 1), c(3, 1);
  const auto next = all_reduce(b);
  submit(0, all_reduce(a));
  submit(1, next);
  submit(2, all_reduce(c));
  settle(world);
  REQUIRE(next->done() && b[0] == 3);
  REQUIRE(group[0]->sequence() == group[1]->sequence() && group[1]->sequence() == group[2]->sequence());
}

void what_needs_everybody_is_refused_while_one_has_joined() {
  Pair pair;
  pair.submit(1, join());
  settle(pair.world);
  std::vector<int64_t> values(4, 1);
  auto gone = std::make_shared<sim::PlainOperation>();
  gone->descriptor = all_reduce(values)->descriptor;
  gone->descriptor.kind = OpKind::kBroadcast;
  gone->descriptor.reduce_op = ReduceOp::kNone;
  gone->descriptor.root = 1;
  gone->outputs = {{reinterpret_cast<std::byte*>(values.data()), 4}};
  pair.submit(0, gone);
  auto places = std::make_shared<sim::PlainOperation>();
  places->descriptor = gone->descriptor;
  places->descriptor.kind = OpKind::kAllGather;
  places->descriptor.root = -1;
  places->inputs = gone->outputs;
  places->outputs = {gone->outputs.front(), gone->outputs.front()};
  pair.submit(0, places);
  const auto fine = all_reduce(values);
  pair.submit(0, fine);
  settle(pair.world);
  for (const auto& call : {gone, places})
    REQUIRE(call->error() && call->error()->message.find("rank 1: has joined") != std::string::npos);
  REQUIRE(fine->done() && !fine->error() && values[0] == 1);
}

void join_of_one_group_leaves_others_alone() {
  SimWorld world(1, two({}));
  const auto g = world.make_group("g", {0, 1}), h = world.make_group("h", {0, 1});
  const auto joined = join();
  world.coordinator(1).submit(g[1], joined);
  std::vector<int64_t> a(3, 1), b(3, 2), c(3, 7);
  world.coordinator(0).submit(h[0], all_reduce(a));
  world.coordinator(1).submit(h[1], all_reduce(b));
  world.coordinator(0).submit(g[0], all_reduce(c));
  settle(world);
  REQUIRE(a[0] == 3 && b[0] == 3 && c[0] == 7 && !joined->done());
}

void join_waits_as_long_as_others_work() {
  Pair pair;
  const auto joined = join();
  joined->submitted = pair.world.now();
  joined->deadline = pair.world.now() + std::chrono::seconds(10);
  pair.submit(1, joined);
  for (int i = 0; i < 5; ++i) {
    pass_time(pair.world, 8);
    std::vector<int64_t> a(3, 1);
    pair.submit(0, all_reduce(a));
    settle(pair.world);
    REQUIRE(!joined->done() && a[0] == 1);
  }
  pass_time(pair.world, 13);
  REQUIRE(joined->done() && joined->error());
  REQUIRE(joined->error()->message.find("rank 0 has not submitted it") != std::string::npos);
}

void identities_change_nothing() {
  const DType types[] = {DType::kBool,     DType::kUint8,   DType::kInt8,    DType::kUint16,    DType::kInt16,
                         DType::kUint32,   DType::kInt32,   DType::kUint64,  DType::kInt64,     DType::kFloat16,
                         DType::kBFloat16, DType::kFloat32, DType::kFloat64, DType::kComplex64, DType::kComplex128};
  const ReduceOp ops[] = {ReduceOp::kSum,    ReduceOp::kAvg,   ReduceOp::kProduct, ReduceOp::kMin,      ReduceOp::kMax,
                          ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor,  ReduceOp::kPremulSum};
  std::mt19937_64 random(7);
  for (const DType type : types) {
    for (const ReduceOp op : ops) {
      if (!can_reduce(type, op)) continue;
      std::byte value[8 * 16], wide[8 * 16], identity[8 * 16], other[8 * 16], result[8 * 16];
      for (std::byte& byte : value) byte = std::byte(type == DType::kBool ? random() % 2 : random() % 256);
      std::memset(value, 0, size_of(type));
      if (type == DType::kFloat32) {  // a sum must keep the sign of zero
        const float zero = -0.0f;
        std::memcpy(value, &zero, sizeof(zero));
      }
      widen(type, wide, value, 8);
      unify_nans(accumulation_type(type), wide, 8);
      fill_identity(type, op, identity, 8);
      widen(type, other, identity, 8);
      std::memcpy(result, wide, sizeof(wide));
      reduce_into(accumulation_type(type), op, result, other, 8);
      unify_nans(accumulation_type(type), result, 8);
      // An infinity times 1 of complex numbers is a NaN in its other part: not a matter of the identity.
      const bool complex_product = op == ReduceOp::kProduct && type >= DType::kComplex64;
      if (complex_product) continue;
      REQUIRE(std::memcmp(result, wide, 8 * size_of(accumulation_type(type))) == 0);
    }
  }
}

void unknown_setting_is_refused() {
  std::string entries[] = {"HOME=/", "MULTICOMM_FUSION_BITES=3"};
  char* environment[] = {entries[0].data(), entries[1].data(), nullptr};
  try {
    read_settings(environment);
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    REQUIRE(text.find("MULTICOMM_FUSION_BITES") != std::string::npos &&
            text.find("MULTICOMM_FUSION_BYTES") != std::string::npos);
    return;
  }
  REQUIRE(!"an unknown setting was accepted");
}

void malformed_setting_is_refused() {
  for (const char* value : {"MULTICOMM_FUSION_BYTES=many", "MULTICOMM_FUSION_BYTES=-1", "MULTICOMM_DETERMINISTIC=maybe",
                            "MULTICOMM_SHUTDOWN_SECONDS=", "MULTICOMM_SHUTDOWN_SECONDS=-2",
                            "MULTICOMM_INSPECT_SIGNAL=KILL", "MULTICOMM_INSPECT_SIGNAL=9"}) {
    std::string entry = value;
    char* environment[] = {entry.data(), nullptr};
    bool refused = false;
    try {
      read_settings(environment);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    REQUIRE(refused);
  }
}

}  // namespace

int main() {
  const std::pair<const char*, std::function<void()>> tests[] = {
#define TEST(name) {#name, name}
      TEST(idle_group_sends_nothing),
      TEST(small_operation_rides_in_the_record),
      TEST(what_piles_up_is_fused),
      TEST(trace_is_told_of_every_state_once),
      TEST(trace_is_told_of_what_does_not_end),
      TEST(equal_operations_are_one_run),
      TEST(deterministic_mode_fuses_nothing),
      TEST(partial_agreement_is_carried_on),
      TEST(disagreement_fails_everywhere_and_touches_nothing),
      TEST(checksum_that_does_not_cancel_is_a_disagreement),
      TEST(same_tensor_twice_means_twice),
      TEST(same_tensor_in_two_groups_is_serial),
      TEST(waiting_operation_keeps_its_place),
      TEST(groups_do_not_wait_for_each_other),
      TEST(given_up_operation_keeps_its_input),
      TEST(memory_lost_to_the_transport_is_refused),
      TEST(variable_sizes_are_exchanged_in_order),
      TEST(variable_sizes_may_disagree_on_everything_else),
      TEST(empty_buffer_pool_allocates),
      TEST(giving_up_during_a_disagreement_spares_what_was_not_offered),
      TEST(deadlines_hold_after_leaving),
      TEST(leaving_a_broken_group_ends_what_it_waits_for),
      TEST(group_outlives_what_is_in_flight),
      TEST(copy_that_fails_fails_its_operation_alone),
      TEST(staging_that_fails_is_told_to_all),
      TEST(death_of_a_member_ends_its_groups_only),
      TEST(missing_ranks_are_named_with_what_they_do),
      TEST(picture_shows_all_ranks),
      TEST(picture_does_not_wait_for_an_interpreter),
      TEST(report_is_bounded_and_checked),
      TEST(leaving_with_peers_at_work_is_told),
      TEST(closed_group_refuses),
      TEST(barrier_waits_for_all),
      TEST(combine_is_symmetric),
      TEST(names_match_in_any_order),
      TEST(repeated_names_cost_one_round),
      TEST(more_names_than_slots),
      TEST(no_name_is_starved_of_a_slot),
      TEST(names_that_change_are_compared_again),
      TEST(name_in_flight_twice_is_told_to_all),
      TEST(waiting_for_names_is_quiet),
      TEST(missing_name_is_reported),
      TEST(joined_rank_takes_part_in_everything),
      TEST(what_needs_everybody_is_refused_while_one_has_joined),
      TEST(join_of_one_group_leaves_others_alone),
      TEST(join_waits_as_long_as_others_work),
      TEST(identities_change_nothing),
      TEST(half_precision_round_trips),
      TEST(unknown_setting_is_refused),
      TEST(malformed_setting_is_refused),
  };
  int failed = 0;
  for (const auto& [name, test] : tests) {
    try {
      test();
      std::printf("ok   %s\n", name);
    } catch (const std::exception& error) {
      std::printf("FAIL %s: %s\n", name, error.what());
      ++failed;
    }
  }
  return failed == 0 ? 0 : 1;
}
