#include "process_group/stack_reader.h"

#include <exception>
#include <system_error>
#include <utility>

#include "bootstrap/background.h"

namespace multicomm {
namespace {

std::function<std::string()>& reader_slot() {
  static auto* reader = new std::function<std::string()>();
  return *reader;
}

}  // namespace

void StackReader::set_reader(std::function<std::string()> reader) { reader_slot() = std::move(reader); }

void StackReader::request() {
  const std::lock_guard lock(mutex_);
  if (stopping_) return;
  requested_ = true;
  if (!thread_.joinable()) {
    try {
      thread_ = bootstrap::start_thread("mc-stacks", [this] { run(); });
    } catch (const std::system_error& error) {  // the engine asks: it must go on
      requested_ = false;
      return done_(std::string("main thread: no thread to read its Python stack: ") + error.what());
    }
  }
  changed_.notify_all();
}

void StackReader::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return requested_ || stopping_; });
    if (stopping_) break;
    requested_ = false;
    lock.unlock();
    std::string stack;
    try {
      stack = reader_slot()();
    } catch (const std::exception& error) {
      stack = std::string("main thread: its Python stack cannot be read: ") + error.what();
    }
    done_(stack);
    lock.lock();
  }
  ended_ = true;
  changed_.notify_all();
}

void StackReader::stop(std::chrono::milliseconds bound) {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  if (!thread_.joinable()) return;
  const bool ended = changed_.wait_for(lock, bound, [this] { return ended_; });
  std::thread thread = std::move(thread_);
  lock.unlock();
  if (ended) thread.join();
  else thread.detach();
}

}  // namespace multicomm
