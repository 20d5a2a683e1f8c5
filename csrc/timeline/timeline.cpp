#include "timeline/timeline.h"

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "bootstrap/background.h"
#include "coordinator/group_state.h"

namespace multicomm::timeline {
namespace {

constexpr size_t kMostEvents = 1 << 15;  // 5 MB, twice
constexpr std::chrono::milliseconds kWriteEvery{100};
constexpr int kLowestPriority = 19;

int64_t in_nanoseconds(Operation::Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

std::string Timeline::start(const std::string& folder, const Origin& origin) {
  const std::lock_guard control(control_mutex_);
  if (thread_.joinable())
    throw std::runtime_error("a timeline is being written already, to " + output_->file.path() + "; stop that first");
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw std::runtime_error("cannot make the folder " + folder + ": " + error.message());
  const std::string path = (std::filesystem::path(folder) / ("rank" + std::to_string(origin.rank) + ".json")).string();
  auto output = std::unique_ptr<Output>(
      new Output{TraceFile(path, origin_event(origin)),
                 ChromeTrace(origin.rank, [this](std::string_view text) { output_->file.append(text); })});
  output_ = std::move(output);
  ring_.resize(kMostEvents);
  taken_.store(filled_.load());  // what an engine that was let go of in its tracks has left
  lost_.store(0);
  file_number_.fetch_add(1);
  stopping_.store(false);
  thread_ = bootstrap::start_thread("mc-timeline", [this] { run(); });
  return path;
}

template <typename Write>
void Timeline::guarded(Write write) {
  if (output_->failed) return;
  try {
    write();
  } catch (const std::runtime_error& error) {  // such as a full disk: what is in the file stays
    output_->failed = true;
    std::fprintf(stderr, "multicomm: the timeline ends here: %s\n", error.what());
  }
}

void Timeline::stop() {
  const std::lock_guard control(control_mutex_);
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_.store(true);
  }
  changed_.notify_one();
  thread_.join();
  write_new();  // here, since the thread's priority may leave it without a core for long
  guarded([this] { output_->file.close(); });
  output_.reset();
}

void Timeline::describe(uint64_t group, const std::string& description) {
  const std::lock_guard lock(mutex_);
  descriptions_[group] = description;
}

int64_t Timeline::now() { return in_nanoseconds(Operation::Clock::now()); }

bool Timeline::push(Event event) {
  const uint64_t at = filled_.load(std::memory_order_relaxed);
  const uint64_t waiting = at - taken_.load(std::memory_order_acquire);
  if (waiting >= kMostEvents) {
    lost_.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  ring_[at % kMostEvents] = std::move(event);
  filled_.store(at + 1, std::memory_order_release);
  if (waiting == kMostEvents / 2) changed_.notify_one();  // should it miss it, it looks in soon
  return true;
}

void Timeline::introduce(const GroupState& group) {
  Event event;
  event.what = Event::What::kGroup;
  event.group = group.number();
  event.texts = std::make_unique<Texts>();
  event.texts->name = group.info().name;
  event.texts->ranks = group.info().ranks;
  event.texts->identity = group.identity();
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = descriptions_.find(group.number()); it != descriptions_.end())
      event.texts->description = it->second;
  }
  if (push(std::move(event))) known_[group.number()] = group.identity() == 0 ? 1 : 2;
}

void Timeline::note(const GroupState& group, Event event) {
  if (const uint64_t file = file_number_.load(std::memory_order_relaxed); known_file_ != file) {
    known_file_ = file;
    known_.clear();
  }
  event.group = group.number();
  if (known_.size() <= event.group) known_.resize(event.group + 1);
  if (known_[event.group] < (group.identity() == 0 ? 1 : 2)) introduce(group);
  push(std::move(event));
}

void Timeline::round_over(const GroupState& group, const RoundTrail& round) {
  if (round.started == 0) return;
  Event event;
  event.what = Event::What::kRound;
  event.operations = round.offered;
  event.agreed = round.agreed;
  event.trail.round = round.number;
  event.begun = round.started;
  event.ended = round.ended;
  note(group, std::move(event));
}

void Timeline::batch_over(const GroupState& group, const BatchTrail& batch) {
  if (batch.first->trail.packing == 0) return;
  Event event;
  event.what = Event::What::kBatch;
  const Descriptor& d = batch.first->descriptor;
  event.kind = d.kind;
  event.dtype = d.dtype;
  event.device = d.device;
  event.failed = batch.failed;
  event.operations = batch.operations;
  event.bytes = batch.bytes;
  event.trail = batch.first->trail;
  event.trail.batch = batch.number;
  event.begun = event.trail.packing;
  event.ended = now();
  note(group, std::move(event));
}

void Timeline::operation_over(const GroupState& group, const Operation& operation, OperationEnd end,
                              const OperationError* error) {
  Event event;
  const Descriptor& d = operation.descriptor;
  event.end = end;
  event.kind = d.kind;
  event.dtype = d.dtype;
  event.reduce_op = d.reduce_op;
  event.device = d.device;
  event.sequence = operation.sequence;
  event.bytes = operation.bytes();
  event.trail = operation.trail;
  event.begun = in_nanoseconds(operation.submitted);
  event.ended = std::max(now(), event.begun);
  const int other = is_point_to_point(d.kind) ? operation.peer : d.root;
  const auto& ranks = group.info().ranks;
  if (other >= 0 && static_cast<size_t>(other) < ranks.size()) event.other = ranks[static_cast<size_t>(other)];
  event.tag = operation.tag;
  event.failed = error != nullptr;
  if (error != nullptr || !operation.name.empty()) {
    event.texts = std::make_unique<Texts>();
    event.texts->name = operation.name;
    if (error != nullptr) event.texts->error = error->message;
  }
  note(group, std::move(event));
}

void Timeline::run() {
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kLowestPriority);  // of this thread alone, on Linux
  while (!stopping_.load()) {
    write_new();
    std::unique_lock lock(mutex_);
    if (!stopping_.load()) changed_.wait_for(lock, kWriteEvery);
  }
}

void Timeline::write_new() {
  const uint64_t end = filled_.load(std::memory_order_acquire);
  const bool stopping = stopping_.load();
  for (uint64_t at = taken_.load(std::memory_order_relaxed); at < end && stopping_.load() == stopping; ++at) {
    guarded([&] { output_->trace.write(ring_[at % kMostEvents]); });
    taken_.store(at + 1, std::memory_order_release);
  }
  guarded([this] {
    if (const uint64_t lost = lost_.exchange(0); lost > 0) output_->trace.lost(lost, now());
    output_->file.flush();
  });
}

}  // namespace multicomm::timeline
