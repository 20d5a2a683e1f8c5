#include "transport/sim/sim_world.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>
#include <utility>

#include "coordinator/reduce_kernels.h"

namespace multicomm::sim {
namespace {

constexpr size_t kTraceLength = 60;

// Runs a batch for all members at once, the plain way.
void execute(const std::vector<Batch*>& batches) {
  const Batch& first = *batches.front();
  for (const Batch* batch : batches) {
    bool same = batch->operations.size() == first.operations.size() && batch->number == first.number;
    for (size_t i = 0; same && i < first.operations.size(); ++i) {
      same = batch->operations[i]->descriptor.agrees_with(first.operations[i]->descriptor) &&
             batch->operations[i]->sequence == first.operations[i]->sequence;
    }
    if (!same) throw OrderViolation("members launched different batches as number " + std::to_string(first.number));
  }
  for (size_t i = 0; i < first.operations.size(); ++i) {
    const Descriptor& d = first.operations[i]->descriptor;
    if (d.kind == OpKind::kGatherVariable) {
      for (const Batch* batch : batches) {
        const Operation& to = *batch->operations[i];
        for (size_t m = 0; m < batches.size() && !to.abandoned; ++m) {
          const Segment& from = batches[m]->operations[i]->inputs.front();
          if (to.outputs[m].count != from.count) throw OrderViolation("a piece is not as large as was said");
          if (from.count > 0) std::memcpy(to.outputs[m].data, from.data, static_cast<size_t>(from.count));
        }
      }
      continue;
    }
    const auto bytes = static_cast<size_t>(d.count) * size_of(d.dtype);
    if (bytes == 0) continue;
    std::vector<std::byte> result(bytes);
    for (size_t m = 0; m < batches.size(); ++m) {
      const Operation& operation = *batches[m]->operations[i];
      if (operation.inputs.empty()) continue;
      const std::byte* data = operation.inputs.front().data;
      if (d.kind == OpKind::kBroadcast || m == 0) std::memcpy(result.data(), data, bytes);
      else reduce_into(d.dtype, d.reduce_op, result.data(), data, static_cast<int64_t>(d.count));
    }
    for (const Batch* batch : batches) {
      const Operation& operation = *batch->operations[i];
      if (!operation.abandoned && !operation.outputs.empty())
        std::memcpy(operation.outputs.front().data, result.data(), bytes);
    }
  }
}

class SimChannel final : public Channel, ControlPlane, DataPlane {
 public:
  SimChannel(SimWorld& world, SimCommunicator& control, SimCommunicator& data, uint64_t identity, int member, int rank)
      : world_(world), control_(control), data_(data), identity_(identity), member_(member), rank_(rank) {}
  uint64_t identity() const override { return identity_; }
  ControlPlane& control() override { return *this; }
  DataPlane& data() override { return *this; }
  void set_sink(PointToPointSink*) override {}
  bool idle() const override { return true; }

  void start_round(const Record& mine, Record& result, Completion& done) override {
    const std::lock_guard lock(world_.mutex());
    Rendezvous& r = control_.join(member_);
    if (!r.entries.empty()) throw OrderViolation("a round met a table");
    r.records.push_back(&mine);
    r.record_results.push_back(&result);
    enter(control_, r, done, [this](Rendezvous& all) {
      // MPI may combine in any order; the result must not depend on it.
      std::vector<size_t> order(all.records.size());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), world_.random());
      Record combined = *all.records[order[0]];
      for (size_t i = 1; i < order.size(); ++i) combine(*all.records[order[i]], combined);
      for (Record* result : all.record_results) *result = combined;
    });
  }

  void start_table(const TableEntry& mine, TableEntry* all, Completion& done) override {
    const std::lock_guard lock(world_.mutex());
    Rendezvous& r = control_.join(member_);
    if (!r.records.empty()) throw OrderViolation("a table met a round");
    r.entries.resize(static_cast<size_t>(control_.size));
    r.entries[static_cast<size_t>(member_)] = &mine;
    r.table_results.push_back(all);
    enter(control_, r, done, [](Rendezvous& everyone) {
      for (TableEntry* result : everyone.table_results)
        for (size_t m = 0; m < everyone.entries.size(); ++m) result[m] = *everyone.entries[m];
    });
  }

  void launch(Batch& batch, Completion& done) override {
    const std::lock_guard lock(world_.mutex());
    Rendezvous& r = data_.join(member_);
    r.batches.resize(static_cast<size_t>(data_.size));
    r.batches[static_cast<size_t>(member_)] = &batch;
    enter(data_, r, done, [](Rendezvous& all) { execute(all.batches); });
  }

  void post(const OperationPtr&) override { throw OrderViolation("the simulation has no point-to-point"); }

 private:
  template <typename Finish>
  void enter(SimCommunicator& communicator, Rendezvous& r, Completion& done, Finish finish) {
    r.deliver.push_back([this, &done] { world_.schedule(rank_, [&done] { done.complete(nullptr); }); });
    if (++r.started < static_cast<size_t>(communicator.size)) return;
    finish(r);
    for (const auto& deliver : r.deliver) deliver();
    r.deliver.clear();
    while (!communicator.open.empty() && communicator.open.front().started == static_cast<size_t>(communicator.size)) {
      communicator.open.pop_front();
      ++communicator.first_open;
    }
  }

  SimWorld& world_;
  SimCommunicator& control_;
  SimCommunicator& data_;
  const uint64_t identity_;
  const int member_;
  const int rank_;
};

}  // namespace

Rendezvous& SimCommunicator::join(int member) {
  const uint64_t number = next[static_cast<size_t>(member)]++;
  const auto index = static_cast<size_t>(number - first_open);
  while (open.size() <= index) open.emplace_back();
  return open[index];
}

SimWorld::SimWorld(uint64_t seed, const std::vector<Settings>& settings) : random_(seed) {
  for (const Settings& s : settings)
    ranks_.push_back(std::make_unique<Rank>(*this, s, static_cast<int>(ranks_.size())));
}

SimWorld::~SimWorld() = default;

std::vector<GroupPtr> SimWorld::make_group(const std::string& name, const std::vector<int>& members) {
  SimCommunicator* pair[2];
  for (auto& communicator : pair) {
    communicators_.push_back(std::make_unique<SimCommunicator>());
    communicator = communicators_.back().get();
    communicator->world = this;
    communicator->size = static_cast<int>(members.size());
    communicator->next.resize(members.size());
  }
  std::vector<GroupPtr> handles;
  for (size_t m = 0; m < members.size(); ++m) {
    Coordinator& coordinator = ranks_[static_cast<size_t>(members[m])]->coordinator;
    const GroupPtr group = coordinator.add_group({name, members, static_cast<int>(m)});
    auto channel =
        std::make_shared<SimChannel>(*this, *pair[0], *pair[1], communicators_.size(), static_cast<int>(m), members[m]);
    coordinator.post([group, channel] { group->connect(channel); });
    handles.push_back(group);
  }
  return handles;
}

size_t SimWorld::Rank::poll() {
  std::deque<std::function<void()>> taken;
  {
    const std::lock_guard lock(world.mutex_);
    taken.swap(arrived);
  }
  for (const auto& completion : taken) completion();
  return taken.size();
}

void SimWorld::Rank::completed(OperationPtr operation) {
  if (sink != nullptr) return sink->completed(std::move(operation));
  if (operation->claim_finalize()) operation->finalize();
}

void SimWorld::Rank::ask(int global_rank, const Inquiry& inquiry) {
  const std::lock_guard lock(world.mutex_);
  if (world.deaf_.count(global_rank) > 0) return;
  world.schedule(global_rank, [this, global_rank, inquiry] {
    const Answer answer = world.coordinator(global_rank).answer(inquiry);
    const std::lock_guard answering(world.mutex_);
    world.schedule(number, [this, global_rank, answer] { coordinator.answered(global_rank, answer); });
  });
}

void SimWorld::Rank::ask_report(int global_rank, const ReportInquiry& inquiry) {
  const std::lock_guard lock(world.mutex_);
  if (world.deaf_.count(global_rank) > 0) return;
  world.schedule(global_rank,
                 [this, global_rank, inquiry] { world.coordinator(global_rank).report_asked(number, inquiry); });
}

void SimWorld::Rank::send_report(int global_rank, uint64_t report_number, const std::string& report) {
  const std::lock_guard lock(world.mutex_);
  world.schedule(global_rank, [this, global_rank, report_number, report] {
    world.coordinator(global_rank).report_came(number, report_number, report);
  });
}

bool SimWorld::step(int rank) { return ranks_[static_cast<size_t>(rank)]->coordinator.step(now_); }

void SimWorld::schedule(int rank, std::function<void()> completion) {
  if (at_once_) ranks_[static_cast<size_t>(rank)]->arrived.push_back(std::move(completion));
  else under_way_.push_back({rank, std::move(completion)});
}

bool SimWorld::deliver_one() {
  if (under_way_.empty()) return false;
  const size_t at = random_() % under_way_.size();
  std::swap(under_way_[at], under_way_.back());
  Delivery delivery = std::move(under_way_.back());
  under_way_.pop_back();
  ranks_[static_cast<size_t>(delivery.rank)]->arrived.push_back(std::move(delivery.completion));
  return true;
}

bool SimWorld::quiet() const {
  return under_way_.empty() &&
         std::all_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->arrived.empty(); });
}

void SimWorld::note(const std::string& event) {
  events_.push_back(event);
  if (events_.size() > kTraceLength) events_.pop_front();
}

std::string SimWorld::trace() const {
  std::ostringstream text;
  for (const std::string& event : events_) text << "  " << event << '\n';
  return text.str();
}

void make_all_reduce(Operation& operation, std::vector<int64_t>& values, ReduceOp op) {
  operation.descriptor.kind = OpKind::kAllReduce;
  operation.descriptor.dtype = DType::kInt64;
  operation.descriptor.reduce_op = op;
  operation.descriptor.count = values.size();
  const Segment segment{reinterpret_cast<std::byte*>(values.data()), static_cast<int64_t>(values.size())};
  operation.inputs = {segment};
  operation.outputs = {segment};
  const auto begin = reinterpret_cast<uintptr_t>(values.data());
  operation.ranges = {{begin, begin + values.size() * sizeof(int64_t), true}};
}

VariableGather::VariableGather(std::string text) : own_(std::move(text)) {
  descriptor.kind = OpKind::kGatherVariable;
  descriptor.dtype = DType::kUint8;
  descriptor.count = kUneven;
  inputs = {{reinterpret_cast<std::byte*>(own_.data()), static_cast<int64_t>(own_.size())}};
}

void VariableGather::set_piece_sizes(const std::vector<int64_t>& sizes) {
  for (const int64_t size : sizes) pieces.emplace_back(static_cast<size_t>(size), '?');
  for (std::string& piece : pieces)
    outputs.push_back({reinterpret_cast<std::byte*>(piece.data()), static_cast<int64_t>(piece.size())});
}

std::string PlainOperation::describe() const {
  std::ostringstream text;
  text << name_of(descriptor.kind);
  if (descriptor.reduce_op != ReduceOp::kNone) text << '(' << name_of(descriptor.reduce_op) << ')';
  text << " of " << name_of(descriptor.dtype) << " [" << descriptor.count << ']';
  return text.str();
}

}  // namespace multicomm::sim
