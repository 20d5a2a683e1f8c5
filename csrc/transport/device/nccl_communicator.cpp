#include "transport/device/nccl_communicator.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

namespace multicomm::device {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds kSpin{50};  // before the pauses: NCCL is seldom done at once, and seldom later
constexpr std::chrono::microseconds kShortestPause{20};
constexpr std::chrono::microseconds kLongestPause{1000};
constexpr std::chrono::seconds kClosing{5};
constexpr std::chrono::seconds kCallPatience{1};  // for a call of the launcher that does not come back

}  // namespace

void NcclCommunicator::check_not_aborted() const {
  if (!aborted_.load()) return;
  const std::string why = failure();
  throw std::runtime_error(why.empty() ? "given up before it was launched" : why);
}

template <typename Use>
void NcclCommunicator::exclusively(Use use) {
  check_not_aborted();  // first: the abort holds the lock for as long as kernels take to leave the device
  const std::lock_guard lock(calls_);
  check_not_aborted();
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
  const auto begin = Clock::now();
  auto pause = kShortestPause;
  while (true) {
    NcclResult state = kNcclSuccess;
    exclusively([&] { check(api_.comm_get_async_error(communicator_.load(), &state), "ncclCommGetAsyncError"); });
    if (state != kNcclInProgress) return exclusively([&] { check(state, what); });
    const auto now = Clock::now();
    if (now >= deadline) throw std::runtime_error(std::string("NCCL: ") + what + " does not come to its end");
    meanwhile();
    if (now - begin < kSpin) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 3 / 2, kLongestPause);
  }
}

// A failure is remembered: a second attempt with the same id would wait for members that never come.
void NcclCommunicator::ensure() {
  if (made_.load()) return;
  const std::string before = failure();
  if (!before.empty()) throw std::runtime_error(before);
  try {
    exclusively([&] {
      NcclConfig config;
      const NcclResult result = api_.comm_init(&raw_, size_, id_, rank_, &config);
      communicator_.store(raw_);
      check(result, "ncclCommInitRankConfig");
    });
    // No deadline of its own: the operation's ends it, through abort(). Meanwhile what was launched before goes on
    // being reported.
    wait_until_ready("ncclCommInitRankConfig", Clock::time_point::max(), [this] { launcher_.attend(); });
  } catch (const std::runtime_error& error) {
    remember(error.what());
    throw;
  }
  made_.store(true);
}

void NcclCommunicator::run(const std::vector<Call>& calls) {
  ensure();
  if (calls.empty()) return;
  exclusively([&] {
    check(api_.group_start(), "ncclGroupStart");
    NcclResult first = kNcclSuccess;
    for (const Call& call : calls) {
      const NcclResult result = call(api_, communicator_.load(), launcher_.native_stream());
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

void NcclCommunicator::remember(const std::string& failure) {
  const std::lock_guard lock(failure_mutex_);
  if (failure_.empty()) failure_ = failure;
}

void NcclCommunicator::look_for_failure() {
  const std::unique_lock lock(calls_, std::try_to_lock);
  if (!lock.owns_lock() || aborted()) return;  // being given up
  try {
    NcclResult state = kNcclSuccess;
    check(api_.comm_get_async_error(communicator_.load(), &state), "ncclCommGetAsyncError");
    check(state, "a collective on the device");
  } catch (const std::runtime_error& error) {
    remember(error.what());
    abort();
  }
}

void NcclCommunicator::abort() {
  if (aborted_.exchange(true)) return;
  // On a thread of its own: NCCL waits there for its kernels to leave the device, which may be behind another
  // communicator's, whose abort is yet to come.
  launcher_.beside([self = shared_from_this()] {
    std::unique_lock lock(self->calls_, std::defer_lock);
    // A call that hangs is ended by the abort; one that comes back uses the communicator no more.
    (void)lock.try_lock_for(kCallPatience);
    if (NcclComm communicator = self->communicator_.exchange(nullptr)) self->api_.comm_abort(communicator);
  });
}

void NcclCommunicator::close() {
  if (made_.load() && !aborted()) launcher_.beside([self = shared_from_this()] { self->finalize(); });
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
