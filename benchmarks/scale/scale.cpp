// What agreement costs at a given number of ranks: runs one scheme in virtual time and prints one JSON object.
//
//     scale --ranks N --steps N [--scheme engine|central|lockstep] [--cycle-us N] [--tree] [--relaxed] [--seed N]
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "engine_scheme.h"
#include "memory_count.h"
#include "rivals.h"

namespace multicomm::scale {
namespace {

struct Options {
  int ranks = 64;
  int steps = 20;
  std::string scheme = "engine";
  Time cycle = 1'000'000;
  Algorithm algorithm = Algorithm::kDoubling;
  Settings settings;
  uint64_t seed = 1;
};

constexpr Time kIdle = 200'000'000;      // how long the ranks are left alone
constexpr Time kLook = 20'000'000;       // how often an idle coordinator looks (coordinator/driver.h)
constexpr Time kIdleCycles = 5'000'000;  // how long lockstep is watched idling

class Json {
 public:
  void number(const char* key, double value) { raw(key, text(value)); }
  void string(const char* key, const std::string& value) { raw(key, '"' + value + '"'); }
  void raw(const char* key, const std::string& value) {
    body_ += (body_.empty() ? "\"" : ", \"") + std::string(key) + "\": " + value;
  }
  std::string str() const { return "{" + body_ + "}"; }

 private:
  static std::string text(double value) {
    char buffer[40];
    std::snprintf(buffer, sizeof buffer, "%.10g", value);
    return buffer;
  }
  std::string body_;
};

std::string summary(Samples& samples) {
  Json json;
  json.number("count", static_cast<double>(samples.count()));
  json.number("median_ns", samples.quantile(0.5));
  json.number("p99_ns", samples.quantile(0.99));
  json.number("max_ns", samples.quantile(1));
  return json.str();
}

struct Simulation {
  explicit Simulation(const Options& options)
      : mesh(options.ranks),
        ledger(mesh),
        data(mesh, events, network),
        programs(mesh, events, ledger, options.steps, options.seed) {}
  void require_finished() const {
    if (!programs.finished()) throw std::runtime_error("some ranks never end: a deadlock");
  }
  Network network;
  Mesh mesh;
  Events events;
  Ledger ledger;
  DataModel data;
  Programs programs;
};

// Bytes that one rank's engine holds, without its lists of members.
struct State {
  double least = 1e18, most = 0, peak = 0, member_lists = 0;
};

State state_of(Mesh& mesh) {
  State state;
  for (int r = 0; r < mesh.ranks(); ++r) {
    double lists = 0;
    for (int k = 0; k < kKinds; ++k)
      lists += static_cast<double>(mesh.place(r, static_cast<Kind>(k)).group->members.size() * sizeof(int));
    const auto& bytes = MemoryCount::of(r);
    state.least = std::min(state.least, static_cast<double>(bytes.live) - lists);
    state.most = std::max(state.most, static_cast<double>(bytes.live) - lists);
    state.peak = std::max(state.peak, static_cast<double>(bytes.peak) - lists);
    state.member_lists = std::max(state.member_lists, lists);
  }
  return state;
}

void run_engine(const Options& options, Simulation& s, Json& json) {
  EngineScheme engine(s.mesh, s.events, s.network, options.settings, options.algorithm, s.ledger, s.data, s.programs);
  s.programs.start(engine);
  s.events.run();
  s.require_finished();

  const uint64_t messages = engine.messages(), happened = s.events.count();
  const State state = state_of(s.mesh);
  for (Time t = kLook; t <= kIdle; t += kLook) engine.look(s.events.now() + kLook);
  json.number("idle_messages", static_cast<double>(engine.messages() - messages));
  json.number("messages", static_cast<double>(messages));
  json.number("busiest_messages", static_cast<double>(engine.busiest()));
  json.number("events", static_cast<double>(happened));
  json.number("engine_steps", static_cast<double>(engine.engine_steps()));
  json.number("state_least", state.least);
  json.number("state_most", state.most);
  json.number("state_peak", state.peak);
  json.number("member_lists", state.member_lists);
  json.number("group_state_size", sizeof(GroupState));
  json.number("record_size", sizeof(Record));
  for (int k = 0; k < kKinds; ++k) {
    const Traffic& t = engine.traffic[static_cast<size_t>(k)];
    Json kind;
    kind.number("rounds", static_cast<double>(t.rounds));
    kind.number("messages_per_round", static_cast<double>(t.round_messages) / static_cast<double>(t.members_in_rounds));
    kind.number("most_sent", t.most_sent);
    kind.number("most_received", t.most_received);
    kind.number("rounds_per_rank", static_cast<double>(t.members_in_rounds) / options.ranks);
    kind.number("orders_per_rank", static_cast<double>(t.members_in_orders) / options.ranks);
    kind.number("bytes_per_rank", static_cast<double>(t.bytes) / options.ranks);
    kind.raw("second_phase", summary(engine.second_phase[static_cast<size_t>(k)]));
    json.raw((std::string("traffic_") + kKindNames[k]).c_str(), kind.str());
  }

  Samples second_phase;
  for (const Samples& samples : engine.second_phase) second_phase.add(samples);
  json.raw("all_second_phase", summary(second_phase));

  // One disagreement in one group, whose members then tell each other who asked for what.
  const Group& group = *s.mesh.place(0, kData).group;
  const bool told = engine.disagree(group, s.events.now());
  json.string("disagreement_told", told ? "all" : "not all");
  const auto& first = MemoryCount::of(0);
  json.number("state_after_disagreement", static_cast<double>(first.live) - state.member_lists);
  json.number("peak_in_disagreement", static_cast<double>(first.peak) - state.member_lists);
}

void run_central(Simulation& s, Json& json) {
  CentralScheme central(s.mesh, s.events, s.network, s.ledger, s.data, s.programs);
  s.programs.start(central);
  s.events.run();
  s.require_finished();
  json.number("messages", static_cast<double>(central.messages()));
  json.number("busiest_messages", static_cast<double>(central.busiest()));
  json.number("idle_messages", 0);
}

void run_lockstep(const Options& options, Simulation& s, Json& json) {
  LockstepScheme lockstep(s.mesh, s.events, s.network, options.cycle, s.ledger, s.data, s.programs);
  lockstep.start();
  s.programs.start(lockstep);
  constexpr Time kSlice = 1'000'000, kLimit = 60'000'000'000;
  for (Time t = kSlice; !s.programs.finished() && t < kLimit; t += kSlice) s.events.run(t);
  s.require_finished();
  const uint64_t messages = lockstep.messages();
  json.number("messages", static_cast<double>(messages));
  json.number("busiest_messages", static_cast<double>(lockstep.busiest()));
  json.number("cycle_us", static_cast<double>(s.events.now()) / 1e3 / static_cast<double>(lockstep.cycles()));
  s.events.run(s.events.now() + kIdleCycles);
  const double idle = static_cast<double>(lockstep.messages() - messages);
  json.number("idle_messages", idle);
  json.number("idle_messages_per_rank_and_second", idle / options.ranks / (static_cast<double>(kIdleCycles) / 1e9));
}

int run(const Options& options) {
  const auto begin = std::chrono::steady_clock::now();
  MemoryCount::set_ranks(options.ranks);
  Simulation s(options);
  Json json;
  json.number("ranks", options.ranks);
  json.number("steps", options.steps);
  json.string("scheme", options.scheme);
  json.string("algorithm", options.algorithm == Algorithm::kDoubling ? "doubling" : "binomial");
  json.number("latency_inside_ns", static_cast<double>(s.network.inside));
  json.number("latency_between_ns", static_cast<double>(s.network.between));
  json.number("send_ns", static_cast<double>(s.network.send));
  json.number("receive_ns", static_cast<double>(s.network.receive));
  json.number("step_ns", static_cast<double>(s.network.step));
  json.number("per_byte_ns", s.network.per_byte);
  if (options.scheme == "engine") run_engine(options, s, json);
  else if (options.scheme == "central") run_central(s, json);
  else run_lockstep(options, s, json);
  json.number("time_per_step_us", static_cast<double>(s.programs.end()) / 1e3 / options.steps);
  int operations = 0;
  Samples agreement, device_launch;
  for (int k = 0; k < kKinds; ++k) {
    Json kind;
    const auto i = static_cast<size_t>(k);
    kind.number("size", s.mesh.largest(static_cast<Kind>(k)));
    kind.number("operations_per_step", Programs::operations_per_step()[i]);
    operations += Programs::operations_per_step()[i];
    agreement.add(s.ledger.agreement[i]);
    device_launch.add(s.ledger.device_launch[i]);
    kind.raw("agreement", summary(s.ledger.agreement[i]));
    kind.raw("device_launch", summary(s.ledger.device_launch[i]));
    json.raw(kKindNames[k], kind.str());
  }
  json.raw("all_agreement", summary(agreement));
  json.raw("all_device_launch", summary(device_launch));
  json.number("operations_per_step", operations);
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  json.number("process_megabytes", static_cast<double>(usage.ru_maxrss) / 1024);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  json.number("seconds", seconds.count());
  std::printf("%s\n", json.str().c_str());
  return 0;
}

int usage() {
  std::fprintf(
      stderr,
      "scale --ranks N --steps N [--scheme engine|central|lockstep] [--cycle-us N] [--tree] [--relaxed] [--seed N]\n"
      "N ranks: a multiple of 32, at least 64; --tree: control collectives as Open MPI does them; --relaxed: see "
      "MULTICOMM_ORDER\n");
  return 2;
}

}  // namespace
}  // namespace multicomm::scale

int main(int argc, char** argv) {
  using namespace multicomm::scale;
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--tree") {
      options.algorithm = Algorithm::kBinomial;
      continue;
    }
    if (name == "--relaxed") {
      options.settings.strict_order = false;
      continue;
    }
    if (++i == argc) return usage();
    const char* value = argv[i];
    if (name == "--ranks") options.ranks = std::atoi(value);
    else if (name == "--steps") options.steps = std::atoi(value);
    else if (name == "--scheme") options.scheme = value;
    else if (name == "--cycle-us") options.cycle = std::atoll(value) * 1000;
    else if (name == "--seed") options.seed = std::strtoull(value, nullptr, 10);
    else return usage();
  }
  const bool known = options.scheme == "engine" || options.scheme == "central" || options.scheme == "lockstep";
  constexpr int kBlock = Mesh::kSmallest / 2;
  if (!known || options.steps < 1 || options.ranks < Mesh::kSmallest || options.ranks % kBlock != 0) return usage();
  try {
    return run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "scale: %s\n", error.what());
    return 1;
  }
}
