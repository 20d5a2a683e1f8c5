// A JSON array on disk that is complete at every moment, also when the process is killed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace multicomm::timeline {

// The closing bracket is there first, at the end of a stretch of spaces, and events are written over the spaces: no
// write ever has to move it. A killed process can leave only a part of what it was writing, in whole pages, so no event
// crosses the end of a page and each begins with its comma. When the spaces are used up a copy with twice as many takes
// the file's place, by a rename.
//
// Used by one thread at a time. Functions that touch the disk throw std::runtime_error; the file then stays as it is.
class TraceFile {
 public:
  // `first`: an object that is in the file from the start. A file at `path` is replaced.
  TraceFile(std::string path, std::string_view first);
  ~TraceFile();
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  // One object of less than a page.
  void append(std::string_view event);
  void flush();
  void close();  // writes what is left and drops the spaces
  const std::string& path() const { return path_; }

 private:
  void grow();
  void replace(uint64_t size);  // by a file of that size with the same events

  const std::string path_;
  int file_ = -1;
  uint64_t size_ = 0;     // of the file
  uint64_t written_ = 0;  // where the events in the file end
  std::string buffer_;    // what follows there
};

}  // namespace multicomm::timeline
