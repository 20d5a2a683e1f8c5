// Launch order over real MPI control messages: under mpirun, two threads per rank submit device operations to
// overlapping groups, each rank in an order of its own.
//
//   order_test [OPERATIONS] [SEED]     MULTICOMM_ORDER=relaxed to see what happens without the order
//
// Exits with 0 when all results are right, 3 when nothing has moved for a while (a deadlock), 1 otherwise.
#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "coordinator/driver.h"
#include "device_double.h"
#include "transport/mpi/control_plane.h"

extern char** environ;

namespace {

using namespace multicomm;
using tests::Device;
using tests::DeviceDouble;
using Clock = Operation::Clock;

constexpr std::chrono::seconds kStuck{10};
constexpr size_t kElements = 8;

struct All final : Progress {
  explicit All(Device& device) : device(device) {}
  size_t poll() override { return requests.poll() + device.poll(); }
  mpi::Requests requests;
  Device& device;
};

class NoHostData final : public DataPlane {
  void launch(Batch&, Completion&) override { throw std::logic_error("a batch of host tensors"); }
  void post(const OperationPtr&) override { throw std::logic_error("a message"); }
};

class DoubleChannel final : public Channel {
 public:
  DoubleChannel(MPI_Comm communicator, All& all, const mpi::Types& types, size_t number, int member, int size)
      : number_(number), control_(communicator, all.requests, types), device_(all.device, number, member, size) {}
  ControlPlane& control() override { return control_; }
  DataPlane& data() override { return host_; }
  DevicePlane* device() override { return &device_; }
  void set_sink(PointToPointSink*) override {}
  bool idle() const override { return true; }
  uint64_t identity() const override { return number_ + 1; }

 private:
  const size_t number_;
  mpi::MpiControlPlane control_;
  DeviceDouble device_;
  NoHostData host_;
};

struct Sum final : Operation {
  explicit Sum(int64_t value) : values(kElements, value) {
    descriptor.kind = OpKind::kAllReduce;
    descriptor.dtype = DType::kInt64;
    descriptor.reduce_op = ReduceOp::kSum;
    descriptor.device = DeviceKind::kCuda;
    descriptor.count = kElements;
    inputs = outputs = {{reinterpret_cast<std::byte*>(values.data()), static_cast<int64_t>(kElements)}};
  }
  std::string describe() const override { return "sum"; }
  std::vector<int64_t> values;
};

struct Group {
  std::vector<int> ranks;
  MPI_Comm communicator = MPI_COMM_NULL;
  GroupPtr handle;  // null on ranks outside
};

std::atomic<uint64_t> finished{0};
std::atomic<int> wrong{0};

// A thread's share: the groups of one parity. Within a window, even ranks take the groups forwards, odd ones backwards.
void submit(Coordinator& coordinator, Driver& driver, const std::vector<Group>& groups, size_t parity, int rank,
            size_t operations, uint64_t seed) {
  std::mt19937_64 shared(seed +
                         parity);  // the same draws on every rank: who is in which group differs, not the program
  for (size_t done = 0; done < operations;) {
    const size_t window = std::min<size_t>(1 + shared() % 20, operations - done);
    std::vector<size_t> plan;
    for (size_t i = 0; i < window; ++i) plan.push_back((shared() % (groups.size() / 2)) * 2 + parity);
    done += window;
    std::stable_sort(plan.begin(), plan.end(), [&](size_t a, size_t b) { return rank % 2 == 0 ? a < b : a > b; });
    std::vector<std::pair<std::shared_ptr<Sum>, size_t>> calls;
    for (const size_t g : plan) {
      if (!groups[g].handle) continue;
      calls.emplace_back(std::make_shared<Sum>(rank + 1), g);
      coordinator.submit(groups[g].handle, calls.back().first);
    }
    driver.wake();
    for (const auto& [call, g] : calls) {
      driver.wait_until([&call = call] { return call->done(); }, Clock::time_point::max());
      int64_t expected = 0;
      for (const int member : groups[g].ranks) expected += member + 1;
      if (call->error() || call->values != std::vector<int64_t>(kElements, expected)) wrong.fetch_add(1);
      finished.fetch_add(1);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const size_t operations = argc > 1 ? std::stoull(argv[1]) : 10'000;
  const uint64_t seed = argc > 2 ? std::stoull(argv[2]) : 1;
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (level < MPI_THREAD_MULTIPLE || size != 4) {
    std::fprintf(stderr, "order_test needs 4 ranks and MPI_THREAD_MULTIPLE\n");
    MPI_Abort(MPI_COMM_WORLD, 1);
  }

  Device device(MPI_COMM_WORLD);
  All all(device);
  const mpi::Types types;
  CompletionQueue completions;
  Coordinator coordinator(read_settings(environ), all, completions);
  Driver driver(coordinator, completions, true);

  // Overlapping, nested, twins, a ring of pairs; even and odd places go to one thread each.
  std::vector<Group> groups;
  for (std::vector<int> ranks : {std::vector<int>{0, 1, 2, 3},
                                 {3, 2, 1, 0},
                                 {0, 1},
                                 {1, 2, 3},
                                 {1, 2},
                                 {0, 1, 2, 3},
                                 {2, 3},
                                 {0, 2},
                                 {3, 0},
                                 {1, 3}})
    groups.push_back({std::move(ranks), MPI_COMM_NULL, nullptr});
  for (size_t g = 0; g < groups.size(); ++g) {
    Group& group = groups[g];
    const auto it = std::find(group.ranks.begin(), group.ranks.end(), rank);
    const int member = it == group.ranks.end() ? MPI_UNDEFINED : static_cast<int>(it - group.ranks.begin());
    MPI_Comm_split(MPI_COMM_WORLD, member == MPI_UNDEFINED ? MPI_UNDEFINED : 0, member, &group.communicator);
    if (member == MPI_UNDEFINED) continue;
    group.handle = coordinator.add_group({"g" + std::to_string(g), group.ranks, member});
    auto channel = std::make_shared<DoubleChannel>(group.communicator, all, types, g, member,
                                                   static_cast<int>(group.ranks.size()));
    coordinator.post([handle = group.handle, channel] { handle->connect(channel); });
  }

  std::atomic<bool> over{false};
  std::thread watch([&] {  // the only way out of a device that waits for ever
    uint64_t last = 0;
    auto since = Clock::now();
    while (!over.load()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      if (finished.load() != last) since = Clock::now();
      last = finished.load();
      if (Clock::now() - since < kStuck) continue;
      std::printf("rank %d: nothing has moved for %d s, after %llu operations: a deadlock\n", rank,
                  static_cast<int>(kStuck.count()), static_cast<unsigned long long>(last));
      std::fflush(stdout);
      _exit(3);
    }
  });

  std::vector<std::thread> threads;
  for (size_t parity = 0; parity < 2; ++parity) {
    threads.emplace_back([&, parity] { submit(coordinator, driver, groups, parity, rank, operations / 2, seed); });
  }
  for (std::thread& thread : threads) thread.join();
  over.store(true);
  watch.join();
  const uint64_t batches = device.batches();
  driver.stop();
  completions.stop(std::chrono::seconds(10));
  MPI_Barrier(MPI_COMM_WORLD);
  device.close();
  std::printf("rank %d: %llu operations in %llu batches, %d wrong\n", rank,
              static_cast<unsigned long long>(finished.load()), static_cast<unsigned long long>(batches), wrong.load());
  for (Group& group : groups)
    if (group.communicator != MPI_COMM_NULL) MPI_Comm_free(&group.communicator);
  MPI_Finalize();
  return wrong.load() == 0 ? 0 : 1;
}
