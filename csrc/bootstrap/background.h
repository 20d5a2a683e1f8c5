// Threads of start-up, and blocking calls that may be given up.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <thread>

namespace multicomm::bootstrap {

// A named thread that takes no signals: Ctrl-C must reach the program's own threads, whose system calls it interrupts.
std::thread start_thread(const std::string& name, std::function<void()> body);

// Runs `call` on a thread of its own and waits for it until `deadline`, or until `give_up` (asked now and then) says
// so. True when it has returned; what it threw is thrown again. When given up, the thread stays behind in the call:
// `call` must own what it uses.
bool call_bounded(const std::string& name, std::chrono::steady_clock::time_point deadline, std::function<void()> call,
                  const std::function<bool()>& give_up);

}  // namespace multicomm::bootstrap
