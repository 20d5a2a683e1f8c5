// A JSON array on disk that is complete at every moment, also when the process is killed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace multicomm::timeline {

// No single write can move the closing bracket behind what is new: a killed process may leave any part of it. So there
// are two files: what is new goes to the one that nobody sees, which then takes the other's name, and the other becomes
// the next to be written to. A killed process leaves the unseen one behind.
//
// Used by one thread at a time. Functions that touch the disk throw std::runtime_error; the file then stays as it is.
class TraceFile {
 public:
  // `first`: what is in the array from the start. A file at `path` is replaced.
  TraceFile(const std::string& path, std::string_view first);
  ~TraceFile();
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  void append(std::string_view event);  // one object
  void flush();
  void close();  // writes what is left
  const std::string& path() const { return path_; }

 private:
  struct Side {
    int file = -1;
    uint64_t end = 0;  // of its last event
  };
  Side begin(std::string_view first) const;
  void exchange() const;

  const std::string path_;
  const std::string unseen_;  // path
  Side seen_side_;
  Side unseen_side_;
  std::string lacking_;  // what the unseen side does not have of the seen one
  std::string new_;      // what neither has
};

}  // namespace multicomm::timeline
