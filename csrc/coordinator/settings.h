// The MULTICOMM_* variables; README.md lists them.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace multicomm {

// What moves the tensors of devices.
enum class CudaMode : uint8_t { kAuto, kNccl, kStaged };

struct Settings {
  uint64_t fusion_buffer_bytes = 8u << 20;
  uint64_t fusion_operation_bytes = 256u << 10;
  bool deterministic = false;
  // Whether device batches of overlapping groups are launched in one agreed order on all ranks.
  bool strict_order = true;
  uint64_t chunk_elements = uint64_t{1} << 30;
  CudaMode cuda = CudaMode::kAuto;
  std::string nccl_library;             // empty: found
  uint64_t staging_bytes = 4u << 20;    // of one chunk on its way through host memory
  bool cuda_high_priority = false;      // of the communication stream
  bool cuda_blocking_wait = false;      // wait() waits for the device
  uint64_t queue_operations = 100'000;  // unfinished operations per process beyond which submission is slowed down
  std::chrono::milliseconds shutdown_timeout{3'000};
  std::chrono::milliseconds stall_warning{30'000};  // 0: none
  std::string timeline;                             // folder; empty: none
  int inspect_signal = 0;                           // 0: none

  // What all ranks of a group must have set alike, since plans depend on it; compared when a group is made.
  std::string shared_text() const;
};

// Reads the environment. Throws std::invalid_argument that names an unknown MULTICOMM_* variable or a malformed value,
// and lists the known ones.
Settings read_settings(char** environment);

struct SettingDescription {
  const char* name;
  const char* meaning;
  std::string value;
};
std::vector<SettingDescription> describe_settings(const Settings& settings);

}  // namespace multicomm
