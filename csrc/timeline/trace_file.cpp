#include "timeline/trace_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace multicomm::timeline {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kFirstSize = 1 << 20;
constexpr uint64_t kWriteAt = 64 << 10;  // gathered before it is written
constexpr uint64_t kTrimTo = 64 << 20;   // a larger file keeps its spaces: copying it would hold up the process's end
constexpr std::string_view kEnd = "\n]\n";

[[noreturn]] void fail(const std::string& path) {
  throw std::runtime_error("cannot write " + path + ": " + std::strerror(errno));
}

// A new file next to the one whose place it takes; gone unless it does.
class Draft {
 public:
  explicit Draft(const std::string& path) : path_(path), name_(path + ".new") {
    file_ = open(name_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file_ < 0) fail(name_);
  }
  ~Draft() {
    if (file_ < 0) return;
    ::close(file_);
    unlink(name_.c_str());
  }
  Draft(const Draft&) = delete;
  Draft& operator=(const Draft&) = delete;

  void write(std::string_view text) {
    for (size_t done = 0; done < text.size();) {
      const ssize_t count = ::write(file_, text.data() + done, text.size() - done);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) fail(name_);
      done += static_cast<size_t>(count);
    }
    size_ += text.size();
  }
  void copy(int from, uint64_t bytes) {
    std::string part(std::min(bytes, kFirstSize), ' ');
    for (uint64_t at = 0; at < bytes;) {
      const ssize_t count =
          pread(from, part.data(), std::min<uint64_t>(part.size(), bytes - at), static_cast<off_t>(at));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) fail(path_);
      write({part.data(), static_cast<size_t>(count)});
      at += static_cast<uint64_t>(count);
    }
  }
  void finish(uint64_t size) {
    const std::string spaces(kWriteAt, ' ');
    while (size_ + kEnd.size() < size) write({spaces.data(), std::min<uint64_t>(kWriteAt, size - kEnd.size() - size_)});
    write(kEnd);
  }
  int take_place() {
    if (rename(name_.c_str(), path_.c_str()) != 0) fail(path_);
    return std::exchange(file_, -1);
  }

 private:
  const std::string path_;
  const std::string name_;
  int file_;
  uint64_t size_ = 0;
};

}  // namespace

TraceFile::TraceFile(std::string path, std::string_view first) : path_(std::move(path)), size_(kFirstSize) {
  Draft draft(path_);
  draft.write("[\n");
  draft.write(first);
  draft.finish(size_);
  file_ = draft.take_place();
  written_ = 2 + first.size();
}

TraceFile::~TraceFile() {
  if (file_ >= 0) ::close(file_);
}

void TraceFile::append(std::string_view event) {
  const uint64_t length = event.size() + 2;
  if (length > kPage) return;
  const uint64_t at = written_ + buffer_.size();
  const uint64_t left = kPage - at % kPage;
  const uint64_t skipped = left < length ? left : 0;
  if (at + skipped + length + kEnd.size() > size_) {
    grow();
    return append(event);
  }
  buffer_.append(skipped, ' ');
  buffer_.append(",\n").append(event);
  if (buffer_.size() >= kWriteAt) flush();
}

void TraceFile::flush() {
  while (!buffer_.empty()) {
    const ssize_t count = pwrite(file_, buffer_.data(), buffer_.size(), static_cast<off_t>(written_));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail(path_);
    written_ += static_cast<uint64_t>(count);
    buffer_.erase(0, static_cast<size_t>(count));
  }
}

void TraceFile::replace(uint64_t size) {
  flush();
  Draft draft(path_);
  draft.copy(file_, written_);
  draft.finish(size);
  ::close(std::exchange(file_, draft.take_place()));
  size_ = std::max(size, written_ + kEnd.size());
}

void TraceFile::grow() { replace(2 * size_); }

void TraceFile::close() {
  if (file_ < 0) return;
  flush();
  if (size_ <= kTrimTo) replace(0);
  ::close(std::exchange(file_, -1));
}

}  // namespace multicomm::timeline
