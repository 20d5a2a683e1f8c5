#include "timeline/trace_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <utility>

namespace multicomm::timeline {
namespace {

constexpr size_t kWriteAt = 256 << 10;  // gathered before it is written
constexpr std::string_view kEnd = "\n]\n";

[[noreturn]] void fail(const std::string& path) {
  throw std::runtime_error("cannot write " + path + ": " + std::strerror(errno));
}

void write_at(int file, std::string_view text, uint64_t at, const std::string& path) {
  while (!text.empty()) {
    const ssize_t count = pwrite(file, text.data(), text.size(), static_cast<off_t>(at));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail(path);
    text.remove_prefix(static_cast<size_t>(count));
    at += static_cast<uint64_t>(count);
  }
}

std::string hidden(const std::string& path) {
  const std::filesystem::path whole(path);
  return (whole.parent_path() / ("." + whole.filename().string() + ".next")).string();
}

}  // namespace

TraceFile::TraceFile(const std::string& path, std::string_view first) : path_(path), unseen_(hidden(path)) {
  seen_side_ = begin(first);
  if (rename(unseen_.c_str(), path_.c_str()) != 0) {
    ::close(seen_side_.file);
    fail(path_);
  }
  unseen_side_ = begin(first);
}

TraceFile::~TraceFile() {
  for (const Side& side : {seen_side_, unseen_side_})
    if (side.file >= 0) ::close(side.file);
}

TraceFile::Side TraceFile::begin(std::string_view first) const {
  Side side{open(unseen_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644), 0};
  if (side.file < 0) fail(unseen_);
  const std::string start = "[\n" + std::string(first);
  write_at(side.file, start + std::string(kEnd), 0, unseen_);
  side.end = start.size();
  return side;
}

// At every moment one of the two has the name that is seen.
void TraceFile::exchange() const {
  if (renameat2(AT_FDCWD, unseen_.c_str(), AT_FDCWD, path_.c_str(), RENAME_EXCHANGE) == 0) return;
  // A file system that cannot, such as NFS: a second name keeps the one that is about to lose its own.
  const std::string kept = unseen_ + "er";
  unlink(kept.c_str());
  if (link(path_.c_str(), kept.c_str()) != 0 || rename(unseen_.c_str(), path_.c_str()) != 0 ||
      rename(kept.c_str(), unseen_.c_str()) != 0) {
    fail(path_);
  }
}

void TraceFile::append(std::string_view event) {
  new_.append(",\n").append(event);
  if (new_.size() >= kWriteAt) flush();
}

void TraceFile::flush() {
  if (new_.empty()) return;
  const size_t length = lacking_.size() + new_.size();
  lacking_.append(new_).append(kEnd);
  write_at(unseen_side_.file, lacking_, unseen_side_.end, unseen_);
  unseen_side_.end += length;
  exchange();
  std::swap(seen_side_, unseen_side_);
  lacking_.swap(new_);
  new_.clear();
}

void TraceFile::close() {
  flush();
  unlink(unseen_.c_str());
}

}  // namespace multicomm::timeline
