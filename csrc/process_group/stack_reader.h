// Reads the Python stack of the main thread without making the engine wait for the interpreter.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace multicomm {

// A thread of its own, started at the first request, since native code may hold the interpreter for as long as it
// likes. Never destroyed: the thread may be in the interpreter when the process ends.
class StackReader {
 public:
  // `done` is called on the thread, once for the requests that came before the reading began.
  explicit StackReader(std::function<void(const std::string&)> done) : done_(std::move(done)) {}

  void request();  // any thread; waits for nobody
  // Before the interpreter is taken down: a thread that then asks for the GIL is ended in the middle of a call. Waits
  // for a reading under way, but not for ever.
  void stop(std::chrono::milliseconds bound);

  // What reads, set by the Python module: takes the GIL, and may throw.
  static void set_reader(std::function<std::string()> reader);

 private:
  void run();

  const std::function<void(const std::string&)> done_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool requested_ = false;  // guarded by mutex_
  bool stopping_ = false;   // guarded by mutex_
  bool ended_ = false;      // guarded by mutex_
  std::thread thread_;      // guarded by mutex_
};

}  // namespace multicomm
