#include "transport/sim/fibers.h"

#include <algorithm>
#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#else
namespace {
void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
}  // namespace
#endif

namespace multicomm::sim {
namespace {

constexpr size_t kStackBytes = size_t{256} << 10;

// Kept from one simulation to the next: fresh pages cost more than the fibers that run on them.
std::vector<std::unique_ptr<char[]>>& free_stacks() {
  static std::vector<std::unique_ptr<char[]>> stacks;
  return stacks;
}

std::unique_ptr<char[]> take_stack() {
  auto& stacks = free_stacks();
  if (stacks.empty()) return std::make_unique_for_overwrite<char[]>(kStackBytes);
  auto stack = std::move(stacks.back());
  stacks.pop_back();
  return stack;
}

}  // namespace

class Scheduler::Fiber {
 public:
  Fiber(int rank, std::string name, std::function<void()> body)
      : rank(rank), name(std::move(name)), body(std::move(body)), stack(take_stack()) {}
  ~Fiber() { free_stacks().push_back(std::move(stack)); }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  const int rank;
  const std::string name;
  std::function<void()> body;
  std::unique_ptr<char[]> stack;
  ucontext_t context{};
  void* fake_stack = nullptr;
  TimePoint wake_at{};
  bool stopped = false;
  bool begun = false;
  bool ended = false;
};

Scheduler* Scheduler::current_ = nullptr;

Scheduler::Scheduler(Random& random) : random_(random) { current_ = this; }

Scheduler::~Scheduler() { unwind(); }

bool Scheduler::ended(const Fiber* fiber) { return fiber->ended; }

Scheduler::Fiber* Scheduler::spawn(int rank, std::string name, std::function<void()> body) {
  fibers_.push_back(
      std::make_unique<Fiber>(rank, "rank " + std::to_string(rank) + ", " + std::move(name), std::move(body)));
  Fiber* fiber = fibers_.back().get();
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack.get();
  fiber->context.uc_stack.ss_size = kStackBytes;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, &Scheduler::enter, 0);
  return fiber;
}

void Scheduler::enter() {
  Scheduler& s = *current_;
  __sanitizer_finish_switch_fiber(nullptr, &s.home_stack_, &s.home_size_);
  Fiber* fiber = s.running_;
  try {
    fiber->body();
  } catch (const Unwind&) {
  } catch (...) {  // carried to the caller of run()
    s.failure_ = std::current_exception();
  }
  fiber->body = nullptr;
  fiber->ended = true;
  __sanitizer_start_switch_fiber(nullptr, s.home_stack_, s.home_size_);
  setcontext(&s.home_);
}

void Scheduler::resume(Fiber* fiber) {
  running_ = fiber;
  fiber->begun = true;
  __sanitizer_start_switch_fiber(&home_fake_stack_, fiber->stack.get(), kStackBytes);
  swapcontext(&home_, &fiber->context);
  __sanitizer_finish_switch_fiber(home_fake_stack_, nullptr, nullptr);
  running_ = nullptr;
}

void Scheduler::leave() {
  Fiber* fiber = running_;
  __sanitizer_start_switch_fiber(&fiber->fake_stack, home_stack_, home_size_);
  swapcontext(&fiber->context, &home_);
  __sanitizer_finish_switch_fiber(fiber->fake_stack, &home_stack_, &home_size_);
}

void Scheduler::yield() {
  if (running_ == nullptr) return;
  if (!unwinding_) leave();
  if (unwinding_ && std::uncaught_exceptions() == 0) throw Unwind{};
}

void Scheduler::sleep_until(TimePoint time) {
  if (running_ == nullptr) return;
  running_->wake_at = time;
  yield();
}

void Scheduler::sleep_about(std::chrono::microseconds time) { sleep_until(now_ + time * (1 + random_() % 20)); }

void Scheduler::point() {
  if (running_ != nullptr && !unwinding_ && random_() % 4 == 0) leave();
}

void Scheduler::wait_a_little() {
  if (running_ != nullptr && !unwinding_) leave();
}

void Scheduler::wake(Fiber* sleeper) { sleeper->wake_at = now_; }

void Scheduler::stop(int rank) {
  for (const auto& fiber : fibers_)
    if (fiber->rank == rank) fiber->stopped = true;
}

void Scheduler::go_on(int rank) {
  for (const auto& fiber : fibers_)
    if (fiber->rank == rank) fiber->stopped = false;
}

void Scheduler::run(const std::function<bool()>& over, TimePoint limit, const std::function<bool()>& outside,
                    unsigned share, const std::function<void()>& resting) {
  while (!over() && now_ < limit) {
    able_.clear();
    TimePoint next = limit;
    for (const auto& fiber : fibers_) {
      if (fiber->ended || fiber->stopped) continue;
      if (fiber->wake_at <= now_) able_.push_back(fiber.get());
      else next = std::min(next, fiber->wake_at);
    }
    ++steps_;
    const uint64_t dice = random_();
    if (dice % 64 < share || able_.empty()) {
      if (outside() || !able_.empty()) continue;
      resting();
      now_ = next;
      continue;
    }
    resume(able_[(dice >> 8) % able_.size()]);
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    now_ += std::chrono::microseconds((dice >> 40) % 64);
  }
}

void Scheduler::unwind() {
  unwinding_ = true;
  for (const auto& fiber : fibers_) {
    if (fiber->begun && !fiber->ended) resume(fiber.get());
    fiber->ended = true;
  }
  failure_ = nullptr;
  unwinding_ = false;
}

std::vector<std::string> Scheduler::unfinished() const {
  std::vector<std::string> names;
  for (const auto& fiber : fibers_)
    if (!fiber->ended) names.push_back(fiber->name);
  return names;
}

}  // namespace multicomm::sim
