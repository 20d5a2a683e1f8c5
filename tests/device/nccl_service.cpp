// The thread behind nonblocking calls, and the end of the process.
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "nccl_double.h"

namespace multicomm::tests::nccl {
namespace {

using Steps = std::list<std::function<bool()>>;

struct Service {
  std::mutex mutex;
  std::condition_variable changed;
  Steps added;        // under the mutex
  bool stop = false;  // under the mutex
  std::thread thread;
  pid_t pid = getpid();

  Service() : thread([this] { loop(); }) {}

  void loop() {
    Steps steps;
    std::unique_lock lock(mutex);
    while (!stop) {
      if (steps.empty()) changed.wait(lock, [this] { return stop || !added.empty(); });
      else changed.wait_for(lock, std::chrono::microseconds(300), [this] { return stop; });
      steps.splice(steps.end(), added);
      lock.unlock();
      steps.remove_if([](const auto& step) { return step(); });
      lock.lock();
    }
  }
};
Service* g_service = nullptr;
std::once_flag g_once;

// Whatever still waits, ends; what streams still run finds `exiting` set.
void end_process() {
  if (g_service->pid != getpid()) return;  // a fork, which has no thread
  {
    const std::scoped_lock lock(g.mutex, g_service->mutex);
    g.exiting = true;
    g_service->stop = true;
    g.changed.notify_all();
    g_service->changed.notify_all();
  }
  g_service->thread.join();
}

}  // namespace

void in_background(std::function<bool()> step) {
  std::call_once(g_once, [] {
    g_service = new Service;  // never destroyed
    std::atexit(end_process);
  });
  const std::scoped_lock lock(g_service->mutex);
  g_service->added.push_back(std::move(step));
  g_service->changed.notify_all();
}

}  // namespace multicomm::tests::nccl
