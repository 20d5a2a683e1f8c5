#include "transport/device/launcher.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "transport/device/device_operation.h"

namespace multicomm::device {
namespace {

constexpr std::chrono::microseconds kShortestPause{20};
constexpr std::chrono::microseconds kLongestPause{500};
constexpr unsigned long kTimerSlack = 1000;          // ns; a pause takes 50 us longer by default
constexpr int kLowPriority = 0, kHighPriority = -1;  // as c10's streams have them

// While a caller records a graph of the device, what this thread asks the device must not count as part of it: by
// default, such a recording forbids it to all threads.
void stay_out_of_captures(c10::DeviceType type) {
  if (type != c10::DeviceType::CUDA) return;
  using Exchange = int (*)(int*);
  constexpr int kRelaxed = 2;  // cudaStreamCaptureModeRelaxed
  if (auto exchange = reinterpret_cast<Exchange>(loaded_symbol("libcudart", "cudaThreadExchangeStreamCaptureMode"))) {
    int mode = kRelaxed;
    exchange(&mode);
  }
}

}  // namespace

void* loaded_symbol(const char* library_prefix, const char* name) {
  struct Search {
    const char* prefix;
    std::string found;
  } search{library_prefix, {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& wanted = *static_cast<Search*>(data);
        const char* slash = std::strrchr(info->dlpi_name, '/');
        const char* base = slash == nullptr ? info->dlpi_name : slash + 1;
        if (std::strncmp(base, wanted.prefix, std::strlen(wanted.prefix)) != 0) return 0;
        wanted.found = info->dlpi_name;
        return 1;
      },
      &search);
  if (search.found.empty()) return nullptr;
  void* library = dlopen(search.found.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  return library == nullptr ? nullptr : dlsym(library, name);
}

void Reports::add(std::function<void()> report) {
  {
    const std::lock_guard lock(mutex_);
    reports_.push_back(std::move(report));
    any_.store(true, std::memory_order_release);
  }
  wake_();
}

size_t Reports::poll() {
  if (!any_.load(std::memory_order_acquire)) return 0;
  std::vector<std::function<void()>> taken;
  {
    const std::lock_guard lock(mutex_);
    taken.swap(reports_);
    any_.store(false, std::memory_order_relaxed);
  }
  for (const auto& report : taken) report();
  return taken.size();
}

void Reports::begin_beside() {
  const std::lock_guard lock(mutex_);
  ++beside_;
}

void Reports::end_beside() {
  const std::lock_guard lock(mutex_);
  if (--beside_ == 0) none_beside_.notify_all();
}

void Reports::await_beside(std::chrono::milliseconds bound) {
  std::unique_lock lock(mutex_);
  none_beside_.wait_for(lock, bound, [this] { return beside_ == 0; });
}

void Launcher::beside(std::function<void()> work) {
  reports_.begin_beside();
  try {
    std::thread([this, work = std::move(work)] {
      try {
        c10::impl::VirtualGuardImpl(device_.type()).setDevice(device_);
        work();
      } catch (const std::exception& error) {  // the device refuses
        std::fprintf(stderr, "multicomm: %s\n", error.what());
      }
      reports_.end_beside();
    }).detach();
  } catch (const std::system_error& error) {
    reports_.end_beside();
    std::fprintf(stderr, "multicomm: no thread for ending a communicator: %s\n", error.what());
  }
}

Launcher::Launcher(c10::Device device, bool high_priority, Reports& reports)
    : device_(device), high_priority_(high_priority), reports_(reports) {
  std::thread thread([this] { run(); });
  pthread_setname_np(thread.native_handle(), "mc-launcher");
  thread.detach();  // a call into the device may never return: it must not hold up the end of the process
}

void Launcher::post(Task task) {
  ++posted_;
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

std::shared_ptr<c10::Event> Launcher::record() {
  auto event = make_event(device_);
  event->record(stream());
  return event;
}

void Launcher::when_done(std::shared_ptr<c10::Event> event, std::function<void(const std::string*)> then) {
  awaited_.push_back({std::move(event), std::move(then)});
}

void Launcher::watch(const void* owner, std::function<void()> look) {
  Watcher& watcher = watchers_[owner];
  watcher.look = std::move(look);
  ++watcher.count;
}

void Launcher::unwatch(const void* owner) {
  const auto it = watchers_.find(owner);
  if (--it->second.count == 0) watchers_.erase(it);
}

// Whether anything has come to pass.
bool Launcher::query() {
  bool any = false;
  while (!awaited_.empty()) {
    std::string error;
    try {
      if (!awaited_.front().event->query()) break;
    } catch (const std::exception& failure) {  // of the device: sticky, so all that follows have it too
      error = failure.what();
    }
    const auto then = std::move(awaited_.front().then);
    awaited_.pop_front();
    then(error.empty() ? nullptr : &error);
    any = true;
  }
  return any;
}

void Launcher::attend() {
  query();
  const auto now = std::chrono::steady_clock::now();
  if (awaited_.empty() || now < next_look_) return;
  next_look_ = now + kLook;
  for (const auto& [owner, watcher] : watchers_) watcher.look();
}

void Launcher::run() {
  prctl(PR_SET_TIMERSLACK, kTimerSlack);
  stay_out_of_captures(device_.type());
  std::optional<c10::StreamGuard> current;
  try {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    guard.setDevice(device_);
    stream_ = std::make_unique<c10::Stream>(guard.getNewStream(device_, high_priority_ ? kHighPriority : kLowPriority));
    native_stream_ = native_handle(*stream_);
    current.emplace(*stream_);
  } catch (const std::exception& error) {
    start_error_ = error.what();
  }
  auto pause = kShortestPause;
  while (true) {
    Task task;
    {
      std::unique_lock lock(mutex_);
      const auto given = [this] { return !tasks_.empty(); };
      if (awaited_.empty()) changed_.wait(lock, given);
      else changed_.wait_for(lock, pause, given);
      if (given()) {
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
    }
    const size_t before = awaited_.size();
    if (task) task();
    task = nullptr;  // what it held goes now, not with the next one
    const size_t with = awaited_.size();
    attend();
    const bool moved = with != before || awaited_.size() != with;
    pause = moved ? kShortestPause : std::min(pause * 3 / 2, kLongestPause);
  }
}

const c10::Stream& Launcher::stream() const {
  if (!stream_) throw std::runtime_error("the device cannot be used: " + start_error_);
  return *stream_;
}

Launcher& Launchers::of(c10::Device device) {
  auto& launcher = launchers_[device.index()];
  if (!launcher) launcher = std::make_unique<Launcher>(device, high_priority_, reports_);
  return *launcher;
}

}  // namespace multicomm::device
