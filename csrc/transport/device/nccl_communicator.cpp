#include "transport/device/nccl_communicator.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

namespace multicomm::device {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds kShortestPause{20};
constexpr std::chrono::microseconds kLongestPause{1000};
constexpr std::chrono::seconds kClosing{5};
constexpr std::chrono::seconds kCallPatience{1};  // for a call of the launcher that does not come back

}  // namespace

template <typename Use>
void NcclCommunicator::exclusively(Use use) {
  const std::lock_guard lock(calls_);
  if (aborted_.load()) {
    const std::string why = failure();
    throw std::runtime_error(why.empty() ? "given up before it was launched" : why);
  }
  use();
}

void NcclCommunicator::check(NcclResult result, const char* what) {
  if (result == kNcclSuccess || result == kNcclInProgress) return;
  std::string text = std::string(what) + ": " + api_.get_error_string(result);
  const char* last = api_.get_last_error == nullptr ? nullptr : api_.get_last_error(communicator_.load());
  if (last != nullptr && *last != 0) text += std::string(" (") + last + ")";
  throw std::runtime_error("NCCL " + version_text(api_.version) + ": " + text);
}

void NcclCommunicator::wait_until_ready(const char* what, Clock::time_point deadline,
                                        const std::function<void()>& meanwhile) {
  auto pause = kShortestPause;
  while (true) {
    NcclResult state = kNcclSuccess;
    exclusively([&] { check(api_.comm_get_async_error(communicator_.load(), &state), "ncclCommGetAsyncError"); });
    if (state != kNcclInProgress) return exclusively([&] { check(state, what); });
    if (Clock::now() >= deadline) throw std::runtime_error(std::string("NCCL: ") + what + " does not come to its end");
    meanwhile();
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 3 / 2, kLongestPause);
  }
}

void NcclCommunicator::ensure() {
  if (made_) return;
  exclusively([&] {
    NcclConfig config;
    NcclComm made = nullptr;
    const NcclResult result = api_.comm_init(&made, size_, id_, rank_, &config);
    communicator_.store(made);
    check(result, "ncclCommInitRankConfig");
  });
  // No deadline of its own: the operation's ends it, through abort().
  // Meanwhile what was launched before goes on being reported.
  wait_until_ready("ncclCommInitRankConfig", Clock::time_point::max(), [this] { launcher_.attend(); });
  made_ = true;
}

void NcclCommunicator::run(const std::vector<Call>& calls) {
  ensure();
  if (calls.empty()) return;
  exclusively([&] {
    check(api_.group_start(), "ncclGroupStart");
    NcclResult first = kNcclSuccess;
    for (const Call& call : calls) {
      const NcclResult result = call(api_, communicator_.load(), launcher_.stream().native_handle());
      if (first == kNcclSuccess || first == kNcclInProgress) first = result;
    }
    const NcclResult end = api_.group_end();  // also after an error: the group must not stay open
    check(first, "a call inside ncclGroup");
    check(end, "ncclGroupEnd");
  });
  wait_until_ready("ncclGroupEnd", Clock::time_point::max(), [this] { launcher_.attend(); });
}

std::string NcclCommunicator::failure() const {
  const std::lock_guard lock(failure_mutex_);
  return failure_;
}

void NcclCommunicator::look_for_failure() {
  try {
    NcclResult state = kNcclSuccess;
    exclusively([&] {
      check(api_.comm_get_async_error(communicator_.load(), &state), "ncclCommGetAsyncError");
      check(state, "a collective on the device");
    });
  } catch (const std::runtime_error& error) {
    if (aborted()) return;
    {
      const std::lock_guard lock(failure_mutex_);
      failure_ = error.what();
    }
    abort();
  }
}

void NcclCommunicator::abort() {
  if (aborted_.exchange(true)) return;
  // On a thread of its own: NCCL waits there for its kernels to leave the device, which may be behind another
  // communicator's, whose abort is yet to come.
  std::thread([self = shared_from_this()] {
    std::unique_lock lock(self->calls_, std::defer_lock);
    // A call that hangs is ended by the abort; one that comes back uses the communicator no more.
    (void)lock.try_lock_for(kCallPatience);
    if (NcclComm communicator = self->communicator_.exchange(nullptr)) self->api_.comm_abort(communicator);
  }).detach();
}

void NcclCommunicator::close() {
  if (made_.load() && !aborted()) std::thread([self = shared_from_this()] { self->finalize(); }).detach();
}

void NcclCommunicator::finalize() {
  try {
    exclusively([&] { check(api_.comm_finalize(communicator_.load()), "ncclCommFinalize"); });
    wait_until_ready("ncclCommFinalize", Clock::now() + kClosing, [] {});
    exclusively([&] {
      aborted_.store(true);  // nothing uses it any more
      check(api_.comm_destroy(communicator_.exchange(nullptr)), "ncclCommDestroy");
    });
  } catch (const std::runtime_error& error) {
    std::fprintf(stderr, "multicomm: while freeing a communicator: %s\n", error.what());
    abort();
  }
}

}  // namespace multicomm::device
