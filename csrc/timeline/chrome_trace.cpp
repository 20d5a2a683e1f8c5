#include "timeline/chrome_trace.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <utility>

#include "bootstrap/host_identity.h"
#include "coordinator/error_text.h"

namespace multicomm::timeline {
namespace {

std::string ranks_text(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + ranks_in_order(ranks);
}

// Equal on two ranks whose steady clocks are one.
std::string clock_identity() {
  struct stat space{};  // a container may have a clock of its own
  if (stat("/proc/self/ns/time", &space) != 0) space.st_ino = 0;
  return bootstrap::boot_id() + "/" + std::to_string(space.st_ino);
}

template <typename Clock>
int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

constexpr size_t kTitle = 80;  // bytes of a group's title
constexpr const char* kLaneNames[] = {"rounds", "batches", "operations", "messages"};

}  // namespace

std::string origin_event(const Origin& origin) {
  Json json;
  json.raw(R"({"ph":"M","name":"multicomm","pid":)").number(origin.rank).raw(R"(,"tid":0,"args":{"version":1,"rank":)");
  json.number(origin.rank).raw(R"(,"world_size":)").number(origin.world_size);
  json.raw(R"(,"place":)").string(origin.place).raw(R"(,"clock":)").string(clock_identity());
  json.raw(R"(,"wall_us":)").microseconds(nanoseconds<std::chrono::system_clock>());
  json.raw(R"(,"steady_us":)").microseconds(nanoseconds<std::chrono::steady_clock>()).raw("}}");
  json.raw(",\n").raw(R"({"ph":"M","name":"process_name","pid":)").number(origin.rank);
  json.raw(R"(,"args":{"name":)").string("rank " + std::to_string(origin.rank) + ", " + origin.place).raw("}}");
  json.raw(",\n").raw(R"({"ph":"M","name":"process_sort_index","pid":)").number(origin.rank);
  json.raw(R"(,"args":{"sort_index":)").number(origin.rank).raw("}}");
  return std::string(json.text());
}

ChromeTrace::ChromeTrace(int rank, Emit emit) : rank_(rank), emit_(std::move(emit)) {}

void ChromeTrace::finish() {
  emit_(json_.text());
  json_.clear();
}

Json& ChromeTrace::head(const char* phase, const char* category, int lane, int64_t begin) {
  json_.raw(R"({"ph":")").raw(phase).raw(R"(","cat":")").raw(category).raw(R"(","pid":)").number(rank_);
  return json_.raw(R"(,"tid":)").number(lane).raw(R"(,"ts":)").microseconds(begin);
}

void ChromeTrace::lost(uint64_t events, int64_t now) {
  head("i", "lost", 0, now).raw(R"(,"s":"p","name":"events lost: )").number(events);
  json_.raw(R"(","args":{"events":)").number(events).raw("}}");
  finish();
}

void ChromeTrace::learn(const Event& event) {
  const Texts& texts = *event.texts;
  Group& group = groups_[event.group];
  group.number = event.group;
  const bool described = !texts.description.empty() && texts.description != "undefined";
  group.title = beginning(described ? texts.description : texts.name, kTitle);
  group.members = beginning(ranks_text(texts.ranks), kTitle);
  Json args;
  args.raw(R"("args":{"group":)").string(group.title).raw(R"(,"number":)").number(event.group);
  group.args = args.text();
  char identity[20];
  std::snprintf(identity, sizeof(identity), "%016" PRIx64, texts.identity);
  json_.raw(R"({"ph":"M","name":"group","pid":)").number(rank_).raw(R"(,"tid":0,)").raw(group.args);
  json_.raw(R"(,"name":)").string(texts.name);
  json_.raw(R"(,"identity":")").raw(texts.identity == 0 ? "" : identity).raw(R"(","size":)").number(texts.ranks.size());
  json_.raw(R"(,"ranks":)").string(group.members).raw("}}");
  finish();
}

int ChromeTrace::lane(Group& group, LaneKind kind, int64_t begin, int64_t end) {
  Lanes& lanes = group.lanes[static_cast<size_t>(kind)];
  int number;
  if (!lanes.free.empty() && lanes.free.front().first <= begin) {
    number = lanes.free.front().second;
    lanes.free.pop();
  } else {
    number = next_lane_++;
    Json name;
    name.raw(group.title).raw(" (").raw(group.members).raw("): ").raw(kLaneNames[static_cast<size_t>(kind)]);
    if (++lanes.count > 1) name.raw(" ").number(lanes.count);
    json_.raw(R"({"ph":"M","name":"thread_name","pid":)").number(rank_).raw(R"(,"tid":)").number(number);
    json_.raw(R"(,"args":{"name":)").string(name.text()).raw("}}");
    finish();
    const auto place = (group.number * kLaneKinds + static_cast<uint64_t>(kind)) * 10'000;
    json_.raw(R"({"ph":"M","name":"thread_sort_index","pid":)").number(rank_).raw(R"(,"tid":)").number(number);
    json_.raw(R"(,"args":{"sort_index":)").number(place + static_cast<uint64_t>(std::min(lanes.count, 9999))).raw("}}");
    finish();
  }
  lanes.free.emplace(end, number);
  return number;
}

void ChromeTrace::write(const Event& event) {
  if (event.what == Event::What::kGroup) return learn(event);
  const auto found = groups_.find(event.group);
  if (found == groups_.end()) return;
  switch (event.what) {
    case Event::What::kRound: return round(event, found->second);
    case Event::What::kBatch: return batch(event, found->second);
    default: return operation(event, found->second);
  }
}

void ChromeTrace::round(const Event& event, Group& group) {
  head("X", "round", lane(group, LaneKind::kRounds, event.begun, event.ended), event.begun);
  json_.raw(R"(,"dur":)").microseconds(event.ended - event.begun).raw(R"(,"name":"round",)").raw(group.args);
  json_.raw(R"(,"round":)").number(event.trail.round);
  json_.raw(R"(,"offered":)").number(event.operations).raw(R"(,"agreed":)").number(event.agreed).raw("}}");
  finish();
}

void ChromeTrace::batch(const Event& event, Group& group) {
  const int number = lane(group, LaneKind::kBatches, event.begun, event.ended);
  head("X", "batch", number, event.begun).raw(R"(,"dur":)").microseconds(event.ended - event.begun);
  json_.raw(R"(,"name":")").raw(name_of(event.kind)).raw(" x ").number(event.operations);
  json_.raw("\",")
      .raw(group.args)
      .raw(R"(,"batch":)")
      .number(event.trail.batch)
      .raw(R"(,"round":)")
      .number(event.trail.round);
  json_.raw(R"(,"operations":)").number(event.operations).raw(R"(,"bytes":)").number(event.bytes);
  json_.raw(R"(,"dtype":")").raw(name_of(event.dtype)).raw(event.failed ? R"(","failed":true)" : "\"");
  states(event);
  json_.raw("}}");
  finish();
}

void ChromeTrace::operation(const Event& event, Group& group) {
  const bool message = is_point_to_point(event.kind);
  const bool waiting = event.end == OperationEnd::kWaiting;
  const LaneKind kind = waiting ? LaneKind::kRounds : message ? LaneKind::kMessages : LaneKind::kOperations;
  // A mark needs no room of its own.
  const int number = waiting ? 0 : lane(group, kind, event.begun, event.ended);
  head(waiting ? "i" : "X", waiting ? "waiting" : "operation", number, waiting ? event.ended : event.begun);
  if (waiting) json_.raw(R"(,"s":"p")");
  else json_.raw(R"(,"dur":)").microseconds(event.ended - event.begun);
  json_.raw(R"(,"name":")").raw(waiting ? "waits for long: " : "").raw(name_of(event.kind));
  json_.raw("\",")
      .raw(group.args)
      .raw(R"(,"sequence":)")
      .number(event.sequence)
      .raw(R"(,"dtype":")")
      .raw(name_of(event.dtype));
  json_.raw(R"(","bytes":)").number(event.bytes);
  if (event.texts && !event.texts->name.empty()) json_.raw(R"(,"name":)").string(event.texts->name);
  if (event.reduce_op != ReduceOp::kNone) json_.raw(R"(,"op":")").raw(name_of(event.reduce_op)).raw("\"");
  if (event.device != DeviceKind::kCpu) json_.raw(R"(,"device":"cuda")");
  if (message) json_.raw(R"(,"peer":)").number(event.other).raw(R"(,"tag":)").number(event.tag);
  else if (event.other >= 0) json_.raw(R"(,"root":)").number(event.other);
  if (event.trail.round >= 0) json_.raw(R"(,"round":)").number(event.trail.round);
  if (event.trail.batch >= 0)
    json_.raw(R"(,"batch":)").number(event.trail.batch).raw(R"(,"fused":)").number(event.trail.fused);
  else if (event.trail.round >= 0 && !message && !event.failed) json_.raw(R"(,"inline":true)");
  if (waiting) json_.raw(R"(,"submitted_us":)").microseconds(event.begun);
  if (event.end == OperationEnd::kUnfinished) json_.raw(R"(,"unfinished":true)");
  if (event.failed) json_.raw(R"(,"error":)").string(event.texts ? event.texts->error : "");
  states(event);
  json_.raw("}}");
  finish();
}

// How long it was in which state, one after the other, in microseconds. As slices of their own they would make the file
// three times as large, and most of the cost is in writing it.
void ChromeTrace::states(const Event& event) {
  const bool of_batch = event.what == Event::What::kBatch;
  const bool on_device = event.device != DeviceKind::kCpu;
  const Trail& t = event.trail;
  const std::pair<int64_t, const char*> marks[] = {
      {of_batch ? 0 : event.begun, "queued"},
      {of_batch ? 0 : t.offered, is_point_to_point(event.kind) ? "posted" : "offered"},
      {of_batch ? 0 : t.agreed, "agreed"},
      {t.packing, "packing"},
      {t.packed, on_device ? "launching" : "moving"},
      {t.launched, "launched"},
  };
  int64_t since = event.begun;
  const char* state = nullptr;
  bool first = true;
  const auto end_state = [&](int64_t at) {
    if (state != nullptr) {
      json_.raw(std::exchange(first, false) ? R"(,"states":{")" : R"(,")").raw(state).raw("\":");
      json_.microseconds(std::max<int64_t>(at - since, 0));
    }
    since = std::max(since, at);
  };
  for (const auto& [at, name] : marks) {
    if (at == 0) continue;
    end_state(std::min(at, event.ended));
    state = name;
  }
  end_state(event.ended);
  if (!first) json_.raw("}");
}

}  // namespace multicomm::timeline
