// Answers who looks at this process from outside: `python -m multicomm inspect`, or a signal.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "coordinator/coordinator.h"
#include "coordinator/driver.h"
#include "process_group/stack_reader.h"

namespace multicomm {

// A thread that sleeps until somebody connects to the process's socket or sends the signal of
// MULTICOMM_INSPECT_SIGNAL; then it has the coordinator ask all ranks. The socket is an abstract one, which leaves
// nothing behind however the process ends, and answers the process's own user and root only. A forked child has neither
// socket nor signal.
//
// Protocol: one line ("who", "picture" or "picture stacks"); the answer, up to the end of the stream, is a line "ok" or
// "failed" and then the text. Never destroyed: its thread may outlive it in a write that nobody reads.
class Inspection {
 public:
  // `signal`: 0 for none.
  Inspection(Coordinator& coordinator, Driver& driver, int signal);
  Inspection(const Inspection&) = delete;
  Inspection& operator=(const Inspection&) = delete;

  // Any thread.
  void joins(int rank, int world_size);                  // this process's place in torch's world
  void started(int rank, int world_size, uint64_t job);  // MPI is up
  void stop();                                           // before the driver and the interpreter are; bounded

 private:
  void listen();
  void handle_signal(int signal);
  void run();
  void serve();
  std::string reply(const std::string& request);
  // Empty when the coordinator does not answer in time.
  std::optional<std::string> picture(bool stacks);
  void print_picture();

  Coordinator& coordinator_;
  Driver& driver_;
  StackReader stacks_;
  int socket_ = -1;
  int signals_ = -1;  // eventfd, written by the signal handler
  int stop_ = -1;     // eventfd

  std::mutex mutex_;
  std::condition_variable changed_;
  int rank_ = -1;          // guarded by mutex_
  int world_size_ = 0;     // guarded by mutex_
  uint64_t job_ = 0;       // guarded by mutex_; 0 before MPI is up
  bool stopping_ = false;  // guarded by mutex_
  bool ended_ = false;     // guarded by mutex_
  std::thread thread_;
};

}  // namespace multicomm
