#include "transport/sim/sim_world.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <sstream>
#include <tuple>
#include <utility>

#include "coordinator/faults.h"
#include "coordinator/reduce_kernels.h"
#include "coordinator/stand_in.h"

namespace multicomm::sim {

class SimChannel;

// One collective of one communicator: the i-th start on every member belongs together, whatever it is, as in MPI.
struct Rendezvous {
  enum class Kind : uint8_t { kNone, kRound, kTable, kOrder, kBatch };
  Kind kind = Kind::kNone;
  std::vector<std::function<void()>> deliver;  // per member that has started, completes it
  std::vector<const Record*> records;
  std::vector<Record*> record_results;
  std::vector<const TableEntry*> entries;
  std::vector<TableEntry*> table_results;
  uint64_t maximum = 0;
  std::vector<uint64_t*> maximum_results;
  std::vector<Batch*> batches;       // by member
  std::vector<Completion*> waiting;  // by member, of batches
  size_t started = 0;

  void add(Batch& batch, Completion& done, size_t member, size_t size) {
    batches.resize(size);
    waiting.resize(size);
    batches[member] = &batch;
    waiting[member] = &done;
    ++started;
  }
};

namespace {

struct Communicator {
  std::map<uint64_t, Rendezvous> open;  // by number
  std::vector<uint64_t> next;           // per member, the number of its next start
};

void erase(Communicator& communicator, const Rendezvous& r) {
  std::erase_if(communicator.open, [&](const auto& entry) { return &entry.second == &r; });
}

const char* name_of(Rendezvous::Kind kind) {
  const char* names[] = {"nothing", "a round", "a table", "a timestamp", "a batch"};
  return names[static_cast<int>(kind)];
}

}  // namespace

struct SimGroup {
  struct Posted {
    OperationPtr operation;
    SimChannel* channel;
    std::vector<std::byte> payload;  // of an eager send, which is done already
    bool eager = false;
  };

  std::string name;
  std::vector<int> members;
  uint64_t identity;
  Communicator control, data, device;
  std::vector<Posted> sends, receives;  // unmatched, in posting order
  uint64_t next_device_message = 0;
  std::map<std::tuple<int, int, uint64_t>, Rendezvous> device_messages;  // by sender, receiver, number of the pair's
  std::map<std::tuple<int, int, int>, uint64_t> next_on_device;          // by sender, receiver, which of them
  std::vector<std::pair<GroupPtr, std::shared_ptr<SimChannel>>> joined;  // until all have
};

namespace {

// What one batch gives each member: written where a member learns that it is over.
using Results = std::vector<std::vector<std::byte>>;

// As far as both ranks have called it.
bool is_same_call(const Operation& a, const Operation& b) {
  for (const Operation* one : {&a, &b})
    if (dynamic_cast<const StandIn*>(one) != nullptr) return true;
  return a.name == b.name && (!a.name.empty() || a.sequence == b.sequence);
}

void check_same(const std::vector<Batch*>& batches) {
  const Batch& first = *batches.front();
  for (const Batch* batch : batches) {
    bool same = batch->operations.size() == first.operations.size() && batch->number == first.number;
    for (size_t i = 0; same && i < first.operations.size(); ++i) {
      same = batch->operations[i]->descriptor.agrees_with(first.operations[i]->descriptor) &&
             is_same_call(*batch->operations[i], *first.operations[i]);
    }
    if (same) continue;
    std::string text = "members launched different batches:";
    for (const Batch* each : batches) {
      text += " " + std::to_string(each->number) + ":";
      for (const OperationPtr& operation : each->operations)
        text += " " + operation->name + " " + operation->describe() + ";";
    }
    throw OrderViolation(text);
  }
}

// Of a message: what was sent.
Results deliver(const std::vector<Batch*>& batches) {
  const Operation& send = *batches[0]->operations.front();
  const Operation& receive = *batches[1]->operations.front();
  if (send.descriptor.kind != OpKind::kSend || receive.descriptor.kind != OpKind::kRecv || send.tag != receive.tag)
    throw OrderViolation("a device was given one message as another");
  return {{send.inputs.front().data, send.inputs.front().data + send.bytes()}};
}

// Runs a batch the plain way: per operation, the result, or all pieces of a gather one after the other.
Results execute(const std::vector<Batch*>& batches) {
  check_same(batches);
  const Batch& first = *batches.front();
  Results results;
  for (size_t i = 0; i < first.operations.size(); ++i) {
    const Descriptor& d = first.operations[i]->descriptor;
    std::vector<std::byte>& result = results.emplace_back();
    if (d.kind == OpKind::kGatherVariable) {
      for (const Batch* batch : batches) {
        const Segment& from = batch->operations[i]->inputs.front();
        result.insert(result.end(), from.data, from.data + from.count);
      }
      continue;
    }
    result.resize(static_cast<size_t>(d.count) * size_of(d.dtype));
    for (size_t m = 0; m < batches.size() && !result.empty(); ++m) {
      const Operation& operation = *batches[m]->operations[i];
      if (operation.inputs.empty()) continue;
      const std::byte* data = operation.inputs.front().data;
      if (d.kind == OpKind::kBroadcast || m == 0) std::memcpy(result.data(), data, result.size());
      else reduce_into(d.dtype, d.reduce_op, result.data(), data, static_cast<int64_t>(d.count));
    }
  }
  return results;
}

void write(const Results& results, Batch& batch) {
  for (size_t i = 0; i < results.size(); ++i) {
    Operation& operation = *batch.operations[i];
    if (operation.abandoned) continue;
    const std::byte* from = results[i].data();
    for (const Segment& to : operation.outputs) {
      const size_t bytes = static_cast<size_t>(to.count) * size_of(operation.descriptor.dtype);
      if (static_cast<size_t>(from - results[i].data()) + bytes > results[i].size())
        throw OrderViolation("a piece is not as large as was said");
      if (bytes > 0) std::memcpy(to.data, from, bytes);
      from += bytes;
    }
  }
}

}  // namespace

class SimDevice final : public DevicePlane {
 public:
  SimDevice(SimWorld& world, SimGroup& group, int member) : world_(world), group_(group), member_(member) {}

  void introduce(int, const Operation&, TableEntry& mine) override { mine.text[0] = static_cast<char>('A' + member_); }
  std::string introduced(int, const std::vector<TableEntry>& all) override {
    for (size_t m = 0; m < group_.members.size(); ++m)
      if (all[m].text[0] != static_cast<char>('A' + m)) throw OrderViolation("not the members' introductions");
    if (std::exchange(ready_, true)) throw OrderViolation("introduced twice");
    return {};
  }
  bool ready() const override { return ready_; }

  void launch(Batch& batch, bool, Completion& done) override {
    const std::lock_guard lock(world_.mutex_);
    auto& stream = world_.rank(rank()).stream;
    const Operation& first = *batch.operations.front();
    const auto told = std::make_shared<bool>(false);
    if (is_point_to_point(first.descriptor.kind)) {
      const bool receives = first.descriptor.kind == OpKind::kRecv;
      const int source = receives ? first.peer : member_, target = receives ? member_ : first.peer;
      const uint64_t number = group_.next_on_device[{source, target, receives ? 1 : 0}]++;
      const auto rank_of = [&](int member) { return group_.members[static_cast<size_t>(member)]; };
      stream.push_back({&group_,
                        &group_.device_messages[{source, target, number}],
                        receives ? size_t{1} : size_t{0},
                        {rank_of(source), rank_of(target)},
                        &batch,
                        &done,
                        told});
    } else {
      if (!ready_) throw OrderViolation("a batch before the introductions");
      const uint64_t number = group_.device.next[static_cast<size_t>(member_)]++;
      stream.push_back(
          {&group_, &group_.device.open[number], static_cast<size_t>(member_), group_.members, &batch, &done, told});
    }
    world_.schedule(
        rank(),
        [told, &done] {
          if (!std::exchange(*told, true)) done.launched();
        },
        nullptr);
    if (stream.size() == 1) next();
  }
  void abort() override {
    const std::lock_guard lock(world_.mutex_);
    auto& stream = world_.rank(rank()).stream;
    const bool was_head = !stream.empty() && stream.front().group == &group_;
    std::erase_if(stream, [&](const SimWorld::OnDevice& entry) {
      if (entry.group != &group_) return false;
      if (entry.begun) --entry.meeting->started;  // its peers' devices wait on
      world_.schedule(
          rank(),
          [done = entry.done, told = entry.told] {
            *told = true;
            const std::string error = "aborted";
            done->complete(&error);
          },
          nullptr);
      return true;
    });
    if (was_head && !stream.empty()) next();
  }

 private:
  int rank() const { return group_.members[static_cast<size_t>(member_)]; }
  void next() {
    // The device goes on when this group is gone.
    world_.schedule(rank(), [world = &world_, to = rank()] { world->device_step(to); }, nullptr, true);
  }

  SimWorld& world_;
  SimGroup& group_;
  const int member_;
  bool ready_ = false;
};

class SimChannel final : public Channel, ControlPlane, DataPlane {
 public:
  SimChannel(SimWorld& world, SimGroup& group, int member)
      : world_(world),
        group_(group),
        member_(member),
        rank_(group.members[static_cast<size_t>(member)]),
        device_(world, group, member) {}
  uint64_t identity() const override { return group_.identity; }
  int rank() const { return rank_; }
  ControlPlane& control() override { return *this; }
  DataPlane& data() override { return *this; }
  DevicePlane* device() override { return &device_; }
  void set_sink(PointToPointSink* sink) override { sink_ = sink; }
  bool idle() const override { return messages_ == 0; }

  void start_round(const Record& mine, Record& result, Completion& done) override {
    const std::lock_guard lock(world_.mutex_);
    Rendezvous& r = join(group_.control, Rendezvous::Kind::kRound);
    r.records.push_back(&mine);
    r.record_results.push_back(&result);
    enter(group_.control, r, done, [this](Rendezvous& all) {
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
    const std::lock_guard lock(world_.mutex_);
    Rendezvous& r = join(group_.control, Rendezvous::Kind::kTable);
    r.entries.resize(group_.members.size());
    r.entries[static_cast<size_t>(member_)] = &mine;
    r.table_results.push_back(all);
    enter(group_.control, r, done, [](Rendezvous& everyone) {
      for (TableEntry* result : everyone.table_results)
        for (size_t m = 0; m < everyone.entries.size(); ++m) result[m] = *everyone.entries[m];
    });
  }

  void start_order(const uint64_t& mine, uint64_t& maximum, Completion& done) override {
    const std::lock_guard lock(world_.mutex_);
    Rendezvous& r = join(group_.control, Rendezvous::Kind::kOrder);
    r.maximum = std::max(r.maximum, mine);
    r.maximum_results.push_back(&maximum);
    enter(group_.control, r, done, [](Rendezvous& all) {
      for (uint64_t* result : all.maximum_results) *result = all.maximum;
    });
  }

  void launch(Batch& batch, Completion& done) override {
    const std::lock_guard lock(world_.mutex_);
    SimWorld::Rank& rank = world_.rank(rank_);
    if (fault(Fault::kLaunchWaits) && (!rank.wait_for_room.empty() || rank.buffers_in_use > 0)) {
      rank.wait_for_room.emplace_back([this, &batch, &done] { start(batch, done); });
      return;
    }
    start(batch, done);
  }

  void post(const OperationPtr& operation) override {
    const std::lock_guard lock(world_.mutex_);
    ++messages_;
    SimGroup::Posted mine{operation, this, {}, false};
    const bool sends = operation->descriptor.kind == OpKind::kSend;
    auto& others = sends ? group_.receives : group_.sends;
    const auto match = std::find_if(others.begin(), others.end(), [&](const SimGroup::Posted& other) {
      const Operation& receive = sends ? *other.operation : *operation;
      const SimChannel& source = sends ? *this : *other.channel;
      const SimChannel& target = sends ? *other.channel : *this;
      const Operation& send = sends ? *operation : *other.operation;
      return send.tag == receive.tag && send.peer == target.member_ &&
             (receive.peer < 0 || receive.peer == source.member_);
    });
    if (match != others.end()) {
      SimGroup::Posted other = std::move(*match);
      others.erase(match);
      const SimGroup::Posted& send = sends ? mine : other;
      const SimGroup::Posted& receive = sends ? other : mine;
      if (operation->descriptor.device != DeviceKind::kCpu) exchange_on_device(send, receive);
      else exchange(sends ? mine : other, sends ? other : mine);
      return;
    }
    if (sends && operation->descriptor.device == DeviceKind::kCpu &&
        world_.random()() % 2 == 0) {  // small enough to be on its way at once
      mine.eager = true;
      mine.payload = payload_of(*operation);
      report(operation, nullptr);
    }
    (sends ? group_.sends : group_.receives).push_back(std::move(mine));
  }

 private:
  static std::vector<std::byte> payload_of(const Operation& send) {
    return {send.inputs.front().data, send.inputs.front().data + send.bytes()};
  }

  // Completes on the rank's driver. The channel outlives it: it is not idle before.
  void report(const OperationPtr& operation, ErrorPtr error, std::vector<std::byte> payload = {}) {
    world_.schedule(
        rank_,
        [this, operation, error = std::move(error), payload = std::move(payload)] {
          if (!error && !operation->abandoned && !payload.empty())
            std::memcpy(operation->outputs.front().data, payload.data(), payload.size());
          --messages_;
          if (sink_ != nullptr) sink_->point_to_point_done(operation, error);
        },
        &group_);
  }

  static void exchange(SimGroup::Posted& send, SimGroup::Posted& receive) {
    std::vector<std::byte> payload = send.eager ? std::move(send.payload) : payload_of(*send.operation);
    ErrorPtr error;
    if (static_cast<int64_t>(payload.size()) != receive.operation->bytes())
      error = std::make_shared<const OperationError>(OperationError{ErrorKind::kUsage, "the sizes differ"});
    if (!send.eager) send.channel->report(send.operation, nullptr);
    receive.channel->report(receive.operation, error, std::move(payload));
  }

  // Each side proposes when it learns that the other has come; the sender knows both proposals first.
  void exchange_on_device(const SimGroup::Posted& send, const SimGroup::Posted& receive) {
    const uint64_t number = (uint64_t{1} << 63) + group_.next_device_message++;
    SimChannel* const from = send.channel;
    SimChannel* const to = receive.channel;
    receive.operation->peer = from->member_;
    to->on_driver([=, sent = send.operation, received = receive.operation](SimChannel& at_target) {
      const uint64_t proposed = at_target.sink_->message_matched(received, number);
      const std::lock_guard lock(at_target.world_.mutex_);
      from->on_driver([=](SimChannel& at_source) {
        const uint64_t timestamp = std::max(proposed, at_source.sink_->message_matched(sent, number));
        {
          const std::lock_guard lock(at_source.world_.mutex_);
          to->on_driver([=](SimChannel& again) {
            --again.messages_;
            again.sink_->message_ordered(received, timestamp);
          });
        }
        --at_source.messages_;
        at_source.sink_->message_ordered(sent, timestamp);
      });
    });
  }
  template <typename Task>
  void on_driver(Task task) {
    world_.schedule(rank_, [this, task] { task(*this); }, &group_);
  }

  Rendezvous& join(Communicator& communicator, Rendezvous::Kind kind) {
    Rendezvous& r = communicator.open[communicator.next[static_cast<size_t>(member_)]++];
    if (r.kind != Rendezvous::Kind::kNone && r.kind != kind)
      throw OrderViolation(std::string(name_of(r.kind)) + " met " + name_of(kind));
    r.kind = kind;
    return r;
  }

  void start(Batch& batch, Completion& done) {
    Rendezvous& r = join(group_.data, Rendezvous::Kind::kBatch);
    r.add(batch, done, static_cast<size_t>(member_), group_.members.size());
    ++world_.rank(rank_).buffers_in_use;
    if (r.started < group_.members.size()) return;
    const auto results = std::make_shared<const Results>(execute(r.batches));
    for (size_t m = 0; m < r.batches.size(); ++m) {
      world_.schedule(
          group_.members[m],
          [&world = world_, to = group_.members[m], results, batch = r.batches[m], done = r.waiting[m]] {
            const bool broken = !world.batch_error_.empty();
            if (!broken) write(*results, *batch);
            done->complete(broken ? &world.batch_error_ : nullptr);
            world.give_buffer(to);
          },
          &group_);
    }
    erase(group_.data, r);
  }

  template <typename Finish>
  void enter(Communicator& communicator, Rendezvous& r, Completion& done, Finish finish) {
    r.deliver.push_back([this, &done] { world_.schedule(rank_, [&done] { done.complete(nullptr); }, &group_); });
    if (++r.started < group_.members.size()) return;
    finish(r);
    for (const auto& deliver : r.deliver) deliver();
    erase(communicator, r);
  }

  SimWorld& world_;
  SimGroup& group_;
  const int member_;
  const int rank_;
  SimDevice device_;
  PointToPointSink* sink_ = nullptr;  // driver
  int messages_ = 0;                  // posted and not reported; guarded by the world's mutex
};

SimWorld::SimWorld(uint64_t seed, const std::vector<Settings>& settings) : random_(seed) {
  for (const Settings& s : settings)
    ranks_.push_back(std::make_unique<Rank>(*this, s, static_cast<int>(ranks_.size())));
}

SimWorld::~SimWorld() = default;

SimGroup& SimWorld::begin_group(const std::string& name, const std::vector<int>& members) {
  const std::lock_guard lock(mutex_);
  SimGroup& group = *groups_.emplace_back(std::make_unique<SimGroup>());
  group.name = name;
  group.members = members;
  group.identity = groups_.size();
  for (Communicator* communicator : {&group.control, &group.data, &group.device})
    communicator->next.resize(members.size());
  return group;
}

GroupPtr SimWorld::join_group(SimGroup& group, int member) {
  const int rank = group.members[static_cast<size_t>(member)];
  const GroupPtr handle = coordinator(rank).add_group({group.name, group.members, member});
  const std::lock_guard lock(mutex_);
  group.joined.emplace_back(handle, std::make_shared<SimChannel>(*this, group, member));
  if (group.joined.size() < group.members.size()) return handle;
  for (auto& [waiting, channel] : std::exchange(group.joined, {}))
    schedule(channel->rank(), [waiting, channel] { waiting->connect(channel); }, &group);
  return handle;
}

std::vector<GroupPtr> SimWorld::make_group(const std::string& name, const std::vector<int>& members) {
  SimGroup& group = begin_group(name, members);
  std::vector<GroupPtr> handles;
  for (size_t m = 0; m < members.size(); ++m) handles.push_back(join_group(group, static_cast<int>(m)));
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
  world.schedule(
      global_rank,
      [this, global_rank, inquiry] {
        const Answer answer = world.coordinator(global_rank).answer(inquiry);
        const std::lock_guard answering(world.mutex_);
        world.schedule(number, [this, global_rank, answer] { coordinator.answered(global_rank, answer); }, nullptr);
      },
      nullptr);
}

void SimWorld::Rank::tell(int global_rank, const Notice& notice) {
  const std::lock_guard lock(world.mutex_);
  world.schedule(global_rank, [this, global_rank, notice] { world.coordinator(global_rank).told(notice); }, nullptr);
}

void SimWorld::Rank::ask_report(int global_rank, const ReportInquiry& inquiry) {
  const std::lock_guard lock(world.mutex_);
  if (world.deaf_.count(global_rank) > 0) return;
  world.schedule(
      global_rank, [this, global_rank, inquiry] { world.coordinator(global_rank).report_asked(number, inquiry); },
      nullptr);
}

void SimWorld::Rank::send_report(int global_rank, uint64_t report_number, const std::string& report) {
  const std::lock_guard lock(world.mutex_);
  world.schedule(
      global_rank,
      [this, global_rank, report_number, report] {
        world.coordinator(global_rank).report_came(number, report_number, report);
      },
      nullptr);
}

bool SimWorld::step(int number) { return rank(number).coordinator.step(now_); }

void SimWorld::schedule(int number, std::function<void()> completion, const SimGroup* group, bool to_device) {
  if (cut_off_.count(number) > 0) return;
  if (at_once_) rank(number).arrived.push_back(std::move(completion));
  else under_way_.push_back({number, std::move(completion), group, to_device});
}

bool SimWorld::deliver_one() {
  if (under_way_.empty()) return false;
  const size_t at = random_() % under_way_.size();
  std::swap(under_way_[at], under_way_.back());
  Delivery delivery = std::move(under_way_.back());
  under_way_.pop_back();
  if (note) {
    note((delivery.to_device ? "the device of rank " : "to rank ") + std::to_string(delivery.rank) +
         (delivery.to_device ? " goes on" : ": something arrives") +
         (delivery.group != nullptr ? " of " + delivery.group->name : ""));
  }
  if (delivery.to_device) delivery.completion();
  else rank(delivery.rank).arrived.push_back(std::move(delivery.completion));
  return true;
}

void SimWorld::device_step(int number) {
  auto& stream = rank(number).stream;
  if (stream.empty() || stream.front().begun) return;
  OnDevice& head = stream.front();
  SimGroup& group = *head.group;
  Rendezvous& r = *head.meeting;
  head.begun = true;
  r.add(*head.batch, *head.done, head.place, head.ranks.size());
  if (r.started < head.ranks.size()) return;
  const std::vector<int> ranks = head.ranks;
  const bool message = is_point_to_point(head.batch->descriptor().kind);
  const Results results = message ? deliver(r.batches) : execute(r.batches);
  for (size_t m = 0; m < ranks.size(); ++m) {
    const int to = ranks[m];
    if (cut_off_.count(to) > 0) continue;  // died in the batch, to which it had brought its part
    const auto told = rank(to).stream.front().told;
    rank(to).stream.pop_front();
    write(results, *r.batches[m]);
    schedule(
        to,
        [told, done = r.waiting[m]] {
          if (!std::exchange(*told, true)) done->launched();
          done->complete(nullptr);
        },
        nullptr);
    if (!rank(to).stream.empty()) schedule(to, [this, to] { device_step(to); }, nullptr, true);
  }
  std::erase_if(group.device_messages, [&](const auto& entry) { return &entry.second == &r; });
  erase(group.device, r);
}

void SimWorld::give_buffer(int number) {
  const std::lock_guard lock(mutex_);
  Rank& r = rank(number);
  --r.buffers_in_use;
  while (!r.wait_for_room.empty() && r.buffers_in_use == 0) {
    const auto start = std::move(r.wait_for_room.front());
    r.wait_for_room.pop_front();
    start();
  }
}

void SimWorld::cut_off(int number) {
  cut_off_.insert(number);
  rank(number).stream.clear();
  rank(number).arrived.clear();
  std::erase_if(under_way_, [&](const Delivery& delivery) {
    if (delivery.rank == number) return true;
    if (delivery.group == nullptr) return false;
    const auto& members = delivery.group->members;
    return std::find(members.begin(), members.end(), number) != members.end() && random_() % 3 == 0;
  });
}

bool SimWorld::quiet() const {
  return under_way_.empty() &&
         std::all_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->arrived.empty(); });
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
  if (descriptor.device != DeviceKind::kCpu) text << " on a device";
  return text.str();
}

}  // namespace multicomm::sim
