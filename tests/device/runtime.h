// The simulated device without torch's faces: streams, events and memory. Part of simulated_device.cpp, which explains
// it.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "stream.h"

namespace multicomm::tests {
namespace {  // one source file includes it

using Clock = std::chrono::steady_clock;
using Task = std::function<void()>;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kPool = 32;                // streams per device and priority, handed out in turn
constexpr int kStreams = 1 + 2 * kPool;  // id 0 is the default stream; then those of usual and of high priority
constexpr int kPoison = 0xFB;            // a byte; simulated.py names it too

long setting(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value ? std::strtol(value, nullptr, 10) : otherwise;
}

c10::DeviceIndex device_count() {
  static const auto count = static_cast<c10::DeviceIndex>(setting("SIM_DEVICES", 8));
  return count;
}

std::atomic<bool> any_started{false};  // a stream's thread exists
std::atomic<bool> bad_fork{false};     // this process was forked from one where such threads existed: it has none
std::atomic<bool> stopping{false};     // the process ends: no further task begins

// ---------------------------------------------------------------------------------------------------------- streams

// All members may be called by any thread. Never destroyed: its thread, begun by the first task, runs until the end.
class SimStream : public DeviceStream {
 public:
  SimStream(int device, int id) : DeviceStream{&SimStream::enqueue_raw}, device_(device), id_(id) {}

  void submit(Task task) {
    TORCH_CHECK(!bad_fork, "the simulated device cannot be used in a forked process");
    std::lock_guard lock(mutex_);
    if (!started_) {
      started_ = any_started = true;
      std::thread([this] { work(); }).detach();
    }
    queue_.push_back(std::move(task));
    ++submitted_;
    changed_.notify_all();
  }

  // For what has been submitted so far, not for what others submit meanwhile.
  void synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this, upto = submitted_] { return completed_ >= upto; });
  }

  bool idle() {
    std::lock_guard lock(mutex_);
    return completed_ == submitted_;
  }

  // `stopping` is set: until the task in flight is over, or for a while (it may wait for what never comes).
  void settle(Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline, [this] { return !running_; });
  }

  std::atomic<bool> capturing{false};

 private:
  static void enqueue_raw(DeviceStream* self, void (*run)(void*), void* argument) {
    static_cast<SimStream*>(self)->submit([run, argument] { run(argument); });
  }

  void work() {
    const long delay = setting("SIM_DELAY_US", 0);
    std::mt19937_64 random(setting("SIM_SEED", 1) * 1'000'003 + device_ * kStreams + id_);
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !queue_.empty() && !stopping; });
      Task task = std::move(queue_.front());
      queue_.pop_front();
      running_ = true;
      lock.unlock();
      if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % (delay + 1)));
      task();
      task = nullptr;  // what it kept alive is gone before anyone sees it completed
      lock.lock();
      running_ = false;
      ++completed_;
      changed_.notify_all();
    }
  }

  const int device_, id_;
  std::mutex mutex_;  // protects all below
  std::condition_variable changed_;
  std::deque<Task> queue_;
  uint64_t submitted_ = 0, completed_ = 0;
  bool started_ = false, running_ = false;
};

struct DeviceState {
  explicit DeviceState(int device) {
    for (int id = 0; id < kStreams; ++id) streams.push_back(std::make_unique<SimStream>(device, id));
  }
  std::vector<std::unique_ptr<SimStream>> streams;
  std::array<std::atomic<unsigned>, 2> next{};  // by priority
};

DeviceState& state_of(c10::DeviceIndex device) {
  static auto& devices = *[] {
    auto* made = new std::vector<std::unique_ptr<DeviceState>>;  // leaked: the threads outlive static destructors
    for (int device = 0; device < device_count(); ++device) made->push_back(std::make_unique<DeviceState>(device));
    pthread_atfork(nullptr, nullptr, [] { bad_fork = any_started.load(); });
    return made;
  }();
  TORCH_CHECK(device >= 0 && device < device_count(), "no simulated device ", int{device});
  return *devices[device];
}

SimStream& stream_of(c10::DeviceIndex device, c10::StreamId id) {
  TORCH_CHECK(id >= 0 && id < kStreams, "no stream ", id, " of a simulated device");
  return *state_of(device).streams[id];
}

SimStream& stream_of(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, 128> current_streams{};  // by device; as many as a DeviceIndex can name

c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }

SimStream& current_stream(c10::Device device) { return stream_of(index_of(device), current_streams[index_of(device)]); }

// ----------------------------------------------------------------------------------------------------------- events

using Moment = std::shared_future<Clock::time_point>;  // when the stream came there

Moment record_on(SimStream& stream) {
  auto reached = std::make_shared<std::promise<Clock::time_point>>();
  Moment moment = reached->get_future().share();
  stream.submit([reached] { reached->set_value(Clock::now()); });
  return moment;
}

void block_on(SimStream& stream, const Moment& moment) {
  stream.submit([moment] { moment.wait(); });
}

// One version of an event is one Moment; recording again replaces it and leaves who waits for the earlier alone.
struct SimEvent {
  Moment latest() {
    std::lock_guard lock(mutex);
    return moment;
  }
  std::mutex mutex;
  Moment moment;  // under mutex
};

SimEvent& event_of(void* event) { return *static_cast<SimEvent*>(event); }

// ----------------------------------------------------------------------------------------------------------- memory

struct Block {
  char* data;
  size_t size;
  c10::DeviceIndex device;          // -1: pinned memory of the host
  std::vector<SimStream*> streams;  // pass before it is freed: that it was allocated on, those recorded; Memory's lock
};

// Device memory and pinned memory, all of it in the host's. Any thread. Freed memory is poisoned and rests for some
// time before it goes back to the system, so that late readers and writers meet poison, and no one else's data.
class Memory {
 public:
  Block* allocate(size_t size, c10::DeviceIndex device, std::vector<SimStream*> streams) {
    constexpr size_t kAlignment = 512;
    const size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
    auto* data = static_cast<char*>(std::aligned_alloc(kAlignment, rounded));
    TORCH_CHECK(data, "no memory for ", size, " bytes of the simulated device");
    std::memset(data, kPoison, rounded);
    auto* block = new Block{data, rounded, device, std::move(streams)};
    std::lock_guard lock(mutex_);
    live_.emplace(data, block);
    return block;
  }

  // The host lets go of it; the streams may still be on their way.
  void release(Block* block) {
    {
      std::lock_guard lock(mutex_);
      live_.erase(block->data);
    }
    if (bad_fork) return;  // the parent's streams do not run here
    std::shared_ptr<Block> last(block, [this](Block* freed) { rest(freed); });
    for (auto* stream : block->streams)
      if (!stream->idle()) stream->submit([last] {});
  }

  void add_stream(const void* data, SimStream* stream) {
    std::lock_guard lock(mutex_);
    Block* block = find(data);
    if (block && std::find(block->streams.begin(), block->streams.end(), stream) == block->streams.end())
      block->streams.push_back(stream);
  }

  std::optional<c10::DeviceIndex> device_of(const void* data) {
    std::lock_guard lock(mutex_);
    Block* block = find(data);
    return block ? std::optional(block->device) : std::nullopt;
  }

 private:
  Block* find(const void* data) {
    auto after = live_.upper_bound(static_cast<const char*>(data));
    if (after == live_.begin()) return nullptr;
    Block* block = std::prev(after)->second;
    return data < block->data + block->size ? block : nullptr;
  }

  void rest(Block* block) {
    constexpr size_t kMost = 64 << 20;
    std::memset(block->data, kPoison, block->size);
    std::lock_guard lock(mutex_);
    resting_.emplace_back(block);
    resting_bytes_ += block->size;
    for (; resting_bytes_ > kMost; resting_.pop_front()) {
      resting_bytes_ -= resting_.front()->size;
      std::free(resting_.front()->data);
    }
  }

  std::mutex mutex_;  // protects all below
  std::map<const char*, Block*> live_;
  std::deque<std::unique_ptr<Block>> resting_;  // the oldest first
  size_t resting_bytes_ = 0;
};

Memory& memory() {
  static auto& memory = *new Memory;
  return memory;
}

}  // namespace
}  // namespace multicomm::tests
