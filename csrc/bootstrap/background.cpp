#include "bootstrap/background.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <future>
#include <memory>
#include <utility>

namespace multicomm::bootstrap {
namespace {

using namespace std::chrono_literals;

}  // namespace

std::thread start_thread(const std::string& name, std::function<void()> body) {
  sigset_t all, before;
  sigfillset(&all);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) sigdelset(&all, fault);
  pthread_sigmask(SIG_BLOCK, &all, &before);  // the new thread inherits the mask, so no signal can slip in before it
  try {
    std::thread thread(std::move(body));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
    return thread;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

bool call_bounded(const std::string& name, std::chrono::steady_clock::time_point deadline, std::function<void()> call,
                  const std::function<bool()>& give_up) {
  auto task = std::make_shared<std::packaged_task<void()>>(std::move(call));
  std::future<void> done = task->get_future();
  start_thread(name, [task] { (*task)(); }).detach();
  while (done.wait_for(20ms) != std::future_status::ready) {
    if (std::chrono::steady_clock::now() >= deadline || give_up()) return false;
  }
  done.get();
  return true;
}

}  // namespace multicomm::bootstrap
