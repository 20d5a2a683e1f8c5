// The engine's real threads on simulated ranks: several callers per rank submit and wait in overlapping groups while
// coordinator and completion threads run. Built with the thread sanitizer; also checks results, callbacks, and that
// nothing hangs.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <future>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include "coordinator/completion_queue.h"
#include "coordinator/driver.h"
#include "transport/sim/sim_world.h"

namespace {

using namespace multicomm;
using Clock = Operation::Clock;

constexpr int kRanks = 3;
constexpr int kCallers = 3;  // per rank, each with a group of its own
constexpr int kRounds = 1500;

// An operation whose completion is asked for: finalize() must come exactly once, on whatever thread.
class CountedOperation final : public Operation {
 public:
  explicit CountedOperation(std::atomic<int>& finalized) : finalized_(finalized) {}
  std::string describe() const override { return "counted"; }
  void finalize() override { finalized_.fetch_add(1); }

 private:
  std::atomic<int>& finalized_;
};

struct Rank {
  Rank(sim::SimWorld& world, int rank) : coordinator(world.coordinator(rank)), driver(coordinator, completions, true) {
    world.set_sink(rank, &completions);
  }
  ~Rank() {
    driver.stop();
    completions.stop(std::chrono::seconds(10));
  }
  CompletionQueue completions;
  Coordinator& coordinator;
  Driver driver;
};

std::atomic<int> finalized{0};
std::atomic<int> failures{0};

std::shared_ptr<CountedOperation> sum_of(std::vector<int64_t>& data) {
  auto operation = std::make_shared<CountedOperation>(finalized);
  sim::make_all_reduce(*operation, data);
  return operation;
}

// One caller: a mixture of synchronous and asynchronous operations, small (inline) and larger (batched).
void call(Rank& rank, const GroupPtr& group, int seed) {
  for (int round = 0; round < kRounds; ++round) {
    const int count = 1 + (seed + round) % 4;
    std::vector<std::vector<int64_t>> values(static_cast<size_t>(count),
                                             std::vector<int64_t>(round % 7 == 0 ? 300 : 4, 1));
    std::vector<std::shared_ptr<CountedOperation>> operations;
    for (auto& data : values) {
      auto operation = sum_of(data);
      rank.coordinator.submit(group, operation);
      if (round % 3 == 0) operation->want_completion();
      operations.push_back(std::move(operation));
    }
    if (round % 2 == 0) rank.driver.wake();
    for (const auto& operation : operations) {
      if (!rank.driver.wait_until([&] { return operation->done(); }, Clock::now() + std::chrono::seconds(60))) {
        std::printf("round %d never completes\n", round);
        failures.fetch_add(1);
        return;
      }
    }
    for (const auto& data : values)
      if (data.front() != kRanks || data.back() != kRanks) failures.fetch_add(1);
  }
}

// A submitter beyond the bound is slowed down by a fixed pace; it is never held up by a peer that has not come.
void submission_beyond_the_bound_is_paced() {
  constexpr int kBound = 50, kBeyond = 200;
  Settings settings;
  settings.queue_operations = kBound;
  sim::SimWorld world(1, {settings, settings});
  world.deliver_at_once();
  const std::vector<GroupPtr> group = world.make_group("paced", {0, 1});
  std::vector<std::vector<int64_t>> values[2] = {std::vector<std::vector<int64_t>>(kBound + kBeyond, {1}),
                                                 std::vector<std::vector<int64_t>>(kBound + kBeyond, {2})};
  {
    Rank first(world, 0), second(world, 1);
    Rank* ranks[] = {&first, &second};
    std::shared_ptr<CountedOperation> last[2];
    for (int r = 0; r < 2; ++r) {
      Clock::time_point full;
      for (int i = 0; i < kBound + kBeyond; ++i) {
        if (i == kBound) full = Clock::now();
        last[r] = sum_of(values[r][static_cast<size_t>(i)]);
        ranks[r]->coordinator.submit(group[static_cast<size_t>(r)], last[r]);
        ranks[r]->driver.pace();
      }
      if (r == 0 && (last[0]->done() || Clock::now() - full < kBeyond * Driver::kPace)) {
        std::printf("%d operations beyond the bound were not slowed down\n", kBeyond);
        failures.fetch_add(1);
      }
    }
    for (int r = 0; r < 2; ++r) {
      if (!ranks[r]->driver.wait_until([&] { return last[r]->done(); }, Clock::now() + std::chrono::seconds(60)))
        failures.fetch_add(1);
    }
  }
  for (const auto& data : values[0])
    if (data.front() != 3) failures.fetch_add(1);
}

// A race on purpose, so that a test can see the sanitizer at work in this very program.
int race() {
  int unguarded = 0;
  std::thread other([&] { ++unguarded; });
  ++unguarded;
  other.join();
  return unguarded == 2 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "--race") return race();
  submission_beyond_the_bound_is_paced();
  finalized = 0;
  int expected = 0;
  {
    sim::SimWorld world(1, std::vector<Settings>(kRanks));
    world.deliver_at_once();
    std::vector<std::vector<GroupPtr>> groups;
    for (int c = 0; c < kCallers; ++c) groups.push_back(world.make_group("g" + std::to_string(c), {0, 1, 2}));
    std::vector<std::unique_ptr<Rank>> ranks;
    for (int r = 0; r < kRanks; ++r) ranks.push_back(std::make_unique<Rank>(world, r));
    std::vector<std::thread> callers;
    for (int c = 0; c < kCallers; ++c) {
      for (int r = 0; r < kRanks; ++r) {
        callers.emplace_back(call, std::ref(*ranks[static_cast<size_t>(r)]),
                             groups[static_cast<size_t>(c)][static_cast<size_t>(r)], c);
      }
      for (int round = 0; round < kRounds; ++round) expected += kRanks * (1 + (c + round) % 4);
    }
    for (std::thread& caller : callers) caller.join();
  }
  if (finalized.load() != expected) {
    std::printf("%d operations were finalized, %d expected\n", finalized.load(), expected);
    failures.fetch_add(1);
  }
  std::printf("%d operations on %d ranks with %d callers each: %s\n", expected, kRanks, kCallers,
              failures.load() == 0 ? "all right" : "FAILED");
  return failures.load() == 0 ? 0 : 1;
}
