// Random programs over random overlapping groups, on simulated ranks, against a plain computation.
//
//   simulate [FIRST_SEED [SEEDS]] [--uneven-fusion]
//
// Every program is legal per group: all members submit a group's operations in one order, and each rank interleaves its
// groups as it likes. Checked: every operation completes, with the right result or, where one member deviates, with an
// error on every member that names all of them and touches nothing; groups part in order; no memory stays claimed. A
// failing seed is printed and replays exactly. With --uneven-fusion the ranks plan from settings that differ, a fault
// that the simulation must find.
#include <cstdio>
#include <cstring>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "transport/sim/sim_world.h"

namespace {

using namespace multicomm;
using sim::Random;
using sim::SimWorld;

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void require(bool condition, const std::string& what) {
  if (!condition) throw Failure(what);
}

struct Planned {
  Descriptor descriptor;
  size_t buffer;     // index into the group's buffers
  int deviant = -1;  // member whose descriptor differs
};

struct Group {
  std::vector<int> members;
  std::vector<Planned> program;
  std::vector<GroupPtr> handles;                                             // per member
  std::vector<std::vector<std::vector<int64_t>>> buffers;                    // [buffer][member]
  std::vector<std::vector<std::vector<int64_t>>> expected;                   // [buffer][member]
  std::vector<std::vector<std::shared_ptr<sim::PlainOperation>>> submitted;  // [member][operation]
};

class Program {
 public:
  Program(uint64_t seed, bool uneven_fusion) : random_(mix(seed)) {
    Settings settings;
    settings.deterministic = chance(10);
    settings.fusion_buffer_bytes = pick(1, 8) * 1024;
    settings.fusion_operation_bytes = pick(0, 4) * 1024;
    std::vector<Settings> all(pick(uneven_fusion ? 2 : 1, 6), settings);
    if (uneven_fusion) {  // made by hand: the group maker refuses settings that differ
      for (Settings& s : all) s.deterministic = false;
      all.back().fusion_operation_bytes = settings.fusion_operation_bytes + 4096;
    }
    world_ = std::make_unique<SimWorld>(seed, all);
    const size_t groups = pick(1, 6);
    for (size_t g = 0; g < groups; ++g) groups_.push_back(make_group(g));
  }

  void run() {
    submit_all();
    check();
    part();
  }
  std::string trace() const { return world_->trace(); }

 private:
  bool chance(int percent) { return static_cast<int>(random_() % 100) < percent; }
  size_t pick(size_t low, size_t high) { return low + random_() % (high - low + 1); }

  Group make_group(size_t number) {
    Group group;
    for (int r = 0; r < world_->size(); ++r)
      if (chance(60)) group.members.push_back(r);
    if (group.members.empty()) {
      for (int r = 0; r < world_->size(); ++r) group.members.push_back(r);
    }
    std::shuffle(group.members.begin(), group.members.end(), random_);
    group.handles = world_->make_group("g" + std::to_string(number), group.members);
    group.submitted.resize(group.members.size());
    const size_t operations = pick(1, 90);
    for (size_t i = 0; i < operations; ++i) plan_operation(group);
    compute(group);
    return group;
  }

  void plan_operation(Group& group) {
    Planned planned;
    Descriptor& d = planned.descriptor;
    d.dtype = DType::kInt64;
    const OpKind kinds[] = {OpKind::kAllReduce, OpKind::kAllReduce, OpKind::kBroadcast,
                            OpKind::kReduce,    OpKind::kBarrier,   OpKind::kGatherVariable};
    d.kind = kinds[pick(0, 5)];
    if (d.kind == OpKind::kGatherVariable) {
      d = sim::VariableGather("").descriptor;
      planned.buffer = group.buffers.size();  // none of its own
      group.buffers.emplace_back(group.members.size());
      if (group.members.size() > 1 && chance(4)) planned.deviant = static_cast<int>(pick(0, group.members.size() - 1));
      group.program.push_back(planned);
      return;
    }
    if (is_reduction(d.kind)) d.reduce_op = chance(80) ? ReduceOp::kSum : ReduceOp::kMax;
    if (d.kind == OpKind::kBroadcast || d.kind == OpKind::kReduce)
      d.root = static_cast<int32_t>(pick(0, group.members.size() - 1));
    if (!group.buffers.empty() && chance(20)) {
      planned.buffer = pick(0, group.buffers.size() - 1);  // the same tensor again, maybe still in flight
    } else {
      planned.buffer = group.buffers.size();
      const size_t sizes[] = {0, 1, pick(2, 100), pick(100, 200), pick(200, 2000)};
      const size_t size = sizes[pick(0, 4)];
      group.buffers.emplace_back();
      for (size_t m = 0; m < group.members.size(); ++m) {
        std::vector<int64_t> values(size);
        for (int64_t& value : values) value = static_cast<int64_t>(random_() % 1000);
        group.buffers.back().push_back(values);
      }
    }
    d.count = d.kind == OpKind::kBarrier ? 0 : group.buffers[planned.buffer].front().size();
    d.equal_hash = mix(d.count);
    if (group.members.size() > 1 && chance(4)) planned.deviant = static_cast<int>(pick(0, group.members.size() - 1));
    group.program.push_back(planned);
  }

  static void compute(Group& group) {
    group.expected = group.buffers;
    for (const Planned& planned : group.program) {
      if (planned.deviant >= 0) continue;
      auto& values = group.expected[planned.buffer];
      const Descriptor& d = planned.descriptor;
      if (d.kind == OpKind::kBarrier || d.kind == OpKind::kGatherVariable) continue;
      std::vector<int64_t> result = values[d.kind == OpKind::kBroadcast ? static_cast<size_t>(d.root) : 0];
      for (size_t m = 1; m < values.size() && is_reduction(d.kind); ++m) {
        for (size_t i = 0; i < result.size(); ++i) {
          result[i] = d.reduce_op == ReduceOp::kSum ? result[i] + values[m][i] : std::max(result[i], values[m][i]);
        }
      }
      for (size_t m = 0; m < values.size(); ++m)
        if (d.kind != OpKind::kReduce || static_cast<int>(m) == d.root) values[m] = result;
    }
  }

  // What a member brings to the gather that is operation `number` of its group; of any length, also none.
  static std::string text_of(size_t number, size_t member) {
    const uint64_t bits = mix(number * 64 + member);
    return std::string(bits % 5 == 0 ? 0 : bits % 300, static_cast<char>('a' + member));
  }

  void submit(Group& group, size_t member) {
    const Planned& planned = group.program[group.submitted[member].size()];
    const size_t number = group.submitted[member].size();
    const bool gathers = planned.descriptor.kind == OpKind::kGatherVariable;
    auto operation = gathers ? std::make_shared<sim::VariableGather>(text_of(number, member))
                             : std::make_shared<sim::PlainOperation>();
    Descriptor& d = operation->descriptor;
    d = planned.descriptor;
    if (planned.deviant == static_cast<int>(member)) d.equal_hash ^= 1;
    auto& values = group.buffers[planned.buffer][member];
    const Segment segment{reinterpret_cast<std::byte*>(values.data()), static_cast<int64_t>(d.count)};
    const bool root = d.root == static_cast<int32_t>(member);
    bool writes = false;
    if (d.kind != OpKind::kBarrier && !gathers) {
      if (d.kind != OpKind::kBroadcast || root) operation->inputs.push_back(segment);
      writes = d.kind == OpKind::kAllReduce || (d.kind == OpKind::kBroadcast ? !root : root);
      if (writes) operation->outputs.push_back(segment);
      const auto begin = reinterpret_cast<uintptr_t>(values.data());
      operation->ranges.push_back({begin, begin + values.size() * sizeof(int64_t), writes});
    }
    group.submitted[member].push_back(operation);
    const int rank = group.members[member];
    world_->note("rank " + std::to_string(rank) + " submits " + operation->describe() + " to " +
                 group.handles[member]->info().name);
    world_->coordinator(rank).submit(group.handles[member], operation);
  }

  // Lets the scheduler go on until nothing moves any more.
  void settle() {
    int still = 0;
    while (still < 3) {
      bool moved = world_->deliver_one();
      for (int r = 0; r < world_->size(); ++r) moved = world_->step(r) || moved;
      still = moved || !world_->quiet() ? 0 : still + 1;
    }
  }

  void submit_all() {
    struct Source {
      Group* group;
      size_t member;
    };
    std::vector<Source> sources;
    for (Group& group : groups_)
      for (size_t m = 0; m < group.members.size(); ++m) sources.push_back({&group, m});
    while (!sources.empty()) {
      const size_t action = pick(0, 9);
      if (action < 5) {
        const size_t at = pick(0, sources.size() - 1);
        for (size_t burst = chance(20) ? pick(1, 60) : 1; burst > 0; --burst) {
          const Source source = sources[at];
          submit(*source.group, source.member);
          if (source.group->submitted[source.member].size() == source.group->program.size()) {
            sources.erase(sources.begin() + static_cast<std::ptrdiff_t>(at));
            break;
          }
        }
      } else if (action < 8) {
        world_->step(static_cast<int>(pick(0, static_cast<size_t>(world_->size()) - 1)));
      } else {
        world_->deliver_one();
      }
    }
    settle();
  }

  void check() const {
    for (const Group& group : groups_) {
      const std::string name = group.handles.front()->info().name;
      for (size_t m = 0; m < group.members.size(); ++m) {
        for (size_t i = 0; i < group.program.size(); ++i) check_operation(group, m, i, name);
        for (size_t b = 0; b < group.buffers.size(); ++b)
          require(group.buffers[b][m] == group.expected[b][m], name + ": wrong values in buffer " + std::to_string(b));
      }
    }
    for (int r = 0; r < world_->size(); ++r) {
      require(world_->coordinator(r).memory().empty(), "memory of finished operations is still claimed");
      require(world_->coordinator(r).unfinished() == 0, "operations are counted as unfinished");
    }
  }

  static void check_operation(const Group& group, size_t member, size_t index, const std::string& name) {
    const auto& operation = *group.submitted[member][index];
    const std::string what = name + ", member " + std::to_string(member) + ", operation " + std::to_string(index);
    require(operation.done(), what + ": never completes (deadlock)");
    require(operation.sequence == index, what + ": wrong sequence number");
    if (group.program[index].deviant < 0) {
      require(operation.error() == nullptr, what + ": " + (operation.error() ? operation.error()->message : ""));
      if (const auto* gather = dynamic_cast<const sim::VariableGather*>(&operation)) {
        require(gather->pieces.size() == group.members.size(), what + ": wrong number of pieces");
        for (size_t m = 0; m < gather->pieces.size(); ++m)
          require(gather->pieces[m] == text_of(index, m), what + ": wrong piece of member " + std::to_string(m));
      }
      return;
    }
    require(operation.error() != nullptr, what + ": a disagreement went unnoticed");
    const std::string& text = operation.error()->message;
    require(text.find("disagree on collective " + std::to_string(index)) != std::string::npos,
            what + ": text: " + text);
    require(text.find(group_name(name)) != std::string::npos, what + ": the text does not name the group: " + text);
  }
  static std::string group_name(const std::string& name) { return "group '" + name + "'"; }

  void part() {
    for (Group& group : groups_)
      for (size_t m = 0; m < group.members.size(); ++m)
        world_->coordinator(group.members[m]).post([handle = group.handles[m]] { handle->leave(); });
    settle();
    for (const Group& group : groups_)
      for (const GroupPtr& handle : group.handles)
        require(handle->closed(), "a group that all members left is not closed");
  }

  Random random_;
  std::unique_ptr<SimWorld> world_;
  std::vector<Group> groups_;
};

}  // namespace

int main(int argc, char** argv) {
  uint64_t numbers[2] = {1, 200};
  bool uneven = false;
  int given = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--uneven-fusion") == 0) uneven = true;
    else if (given < 2) numbers[given++] = std::stoull(argv[i]);
  }
  for (uint64_t seed = numbers[0]; seed < numbers[0] + numbers[1]; ++seed) {
    Program program(seed, uneven);
    try {
      program.run();
    } catch (const std::exception& failure) {
      std::printf("seed %llu: %s\nlast events:\n%s", static_cast<unsigned long long>(seed), failure.what(),
                  program.trace().c_str());
      return 1;
    }
  }
  std::printf("%llu seeds from %llu: all programs completed with the right results\n",
              static_cast<unsigned long long>(numbers[1]), static_cast<unsigned long long>(numbers[0]));
  return 0;
}
