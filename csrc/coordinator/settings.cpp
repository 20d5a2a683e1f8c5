#include "coordinator/settings.h"

#include <charconv>
#include <csignal>
#include <cstring>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "coordinator/record.h"

namespace multicomm {
namespace {

struct Known {
  const char* name;
  const char* meaning;
  void (*parse)(Settings&, std::string_view);  // null: read elsewhere
  std::string (*show)(const Settings&);
};

[[noreturn]] void reject(std::string_view text, const char* wanted) {
  throw std::invalid_argument("'" + std::string(text) + "' is not " + wanted);
}

uint64_t parse_number(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) reject(text, "a whole number >= 0");
  return value;
}

bool parse_flag(std::string_view text) {
  if (text == "1" || text == "true" || text == "on") return true;
  if (text == "0" || text == "false" || text == "off") return false;
  reject(text, "one of 0, 1, false, true, off, on");
}

std::chrono::milliseconds parse_seconds(std::string_view text) {
  size_t used = 0;
  double value = -1;
  try {
    value = std::stod(std::string(text), &used);
  } catch (const std::logic_error&) {
    used = 0;
  }
  if (used != text.size() || !(value >= 0 && value < 1e9)) reject(text, "a number of seconds >= 0");
  return std::chrono::milliseconds(static_cast<int64_t>(value * 1000));
}

// Those that mean nothing to the system, a launcher or Python by themselves.
constexpr std::pair<const char*, int> kSignals[] = {
    {"HUP", SIGHUP},   {"QUIT", SIGQUIT},     {"USR1", SIGUSR1},   {"USR2", SIGUSR2},
    {"ALRM", SIGALRM}, {"URG", SIGURG},       {"WINCH", SIGWINCH}, {"IO", SIGIO},
    {"PROF", SIGPROF}, {"VTALRM", SIGVTALRM}, {"PWR", SIGPWR},
};

int parse_signal(std::string_view text) {
  if (text == "0") return 0;
  const std::string_view name = text.starts_with("SIG") ? text.substr(3) : text;
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  for (const auto& [known, signal] : kSignals)
    if (name == known || (is_number && number == signal)) return signal;
  if (is_number && number >= SIGRTMIN && number <= SIGRTMAX) return number;
  std::string wanted = "0 or one of";
  for (const auto& [known, signal] : kSignals) wanted += std::string(" ") + known;
  reject(text, (wanted + ", or the number of a real-time signal").c_str());
}

std::string signal_name(int number) {
  for (const auto& [known, signal] : kSignals)
    if (number == signal) return known;
  return std::to_string(number);
}

const char* cuda_name(CudaMode mode) {
  return mode == CudaMode::kAuto ? "auto" : mode == CudaMode::kNccl ? "nccl" : "staged";
}

const Known kKnown[] = {
    {"MULTICOMM_FUSION_BYTES", "largest fused buffer, bytes (all ranks alike)",
     [](Settings& s, std::string_view v) { s.fusion_buffer_bytes = parse_number(v); },
     [](const Settings& s) { return std::to_string(s.fusion_buffer_bytes); }},
    {"MULTICOMM_FUSION_OPERATION_BYTES", "operations above this size run alone, bytes (all ranks alike)",
     [](Settings& s, std::string_view v) { s.fusion_operation_bytes = parse_number(v); },
     [](const Settings& s) { return std::to_string(s.fusion_operation_bytes); }},
    {"MULTICOMM_DETERMINISTIC", "1: a result is a function of the inputs bit for bit; no fusion (all ranks alike)",
     [](Settings& s, std::string_view v) { s.deterministic = parse_flag(v); },
     [](const Settings& s) { return std::string(s.deterministic ? "1" : "0"); }},
    {"MULTICOMM_ORDER",
     "strict: device batches of overlapping groups are launched in one order on all ranks; relaxed: as each rank "
     "comes to them, so that order is the program's duty (all ranks alike)",
     [](Settings& s, std::string_view v) {
       if (v != "strict" && v != "relaxed") reject(v, "one of strict, relaxed");
       s.strict_order = v == "strict";
     },
     [](const Settings& s) { return std::string(s.strict_order ? "strict" : "relaxed"); }},
    {"MULTICOMM_CUDA",
     "what moves CUDA tensors: nccl; staged: host memory and MPI; auto: NCCL, or host memory where NCCL cannot (all "
     "ranks alike)",
     [](Settings& s, std::string_view v) {
       if (v == "auto") s.cuda = CudaMode::kAuto;
       else if (v == "nccl") s.cuda = CudaMode::kNccl;
       else if (v == "staged") s.cuda = CudaMode::kStaged;
       else reject(v, "one of auto, nccl, staged");
     },
     [](const Settings& s) { return std::string(cuda_name(s.cuda)); }},
    {"MULTICOMM_CUDA_HIGH_PRIORITY", "1: communication on CUDA devices runs on a stream of high priority",
     [](Settings& s, std::string_view v) { s.cuda_high_priority = parse_flag(v); },
     [](const Settings& s) { return std::string(s.cuda_high_priority ? "1" : "0"); }},
    {"MULTICOMM_CUDA_BLOCKING_WAIT",
     "1: wait() of CUDA tensors returns when the device is done, with its errors; 0: when it is launched",
     [](Settings& s, std::string_view v) { s.cuda_blocking_wait = parse_flag(v); },
     [](const Settings& s) { return std::string(s.cuda_blocking_wait ? "1" : "0"); }},
    {"MULTICOMM_NCCL_LIBRARY", "path of libnccl.so.2 (default: the one that torch uses)",
     [](Settings& s, std::string_view v) { s.nccl_library = v; }, [](const Settings& s) { return s.nccl_library; }},
    {"MULTICOMM_STAGING_BYTES",
     "CUDA tensors on their way through host memory: bytes of a chunk, beyond which the next one's copy overlaps it "
     "(all ranks alike)",
     [](Settings& s, std::string_view v) {
       s.staging_bytes = parse_number(v);
       if (s.staging_bytes == 0) reject(v, "at least 1");
     },
     [](const Settings& s) { return std::to_string(s.staging_bytes); }},
    {"MULTICOMM_CHUNK_ELEMENTS",
     "most elements (bytes, of a message) that one MPI call moves; larger ones take several (all ranks alike)",
     [](Settings& s, std::string_view v) {
       s.chunk_elements = parse_number(v);
       if (s.chunk_elements == 0 || s.chunk_elements > INT32_MAX) reject(v, "between 1 and 2147483647");
     },
     [](const Settings& s) { return std::to_string(s.chunk_elements); }},
    {"MULTICOMM_QUEUE_OPERATIONS", "unfinished operations per process beyond which submission is slowed down",
     [](Settings& s, std::string_view v) { s.queue_operations = parse_number(v); },
     [](const Settings& s) { return std::to_string(s.queue_operations); }},
    {"MULTICOMM_SHUTDOWN_SECONDS", "how long the end of a process waits for its peers, seconds",
     [](Settings& s, std::string_view v) { s.shutdown_timeout = parse_seconds(v); },
     [](const Settings& s) { return std::to_string(s.shutdown_timeout.count() / 1000.0); }},
    {"MULTICOMM_STALL_WARNING",
     "after how long an operation that waits is reported on stderr, with who it waits for, seconds (0: never)",
     [](Settings& s, std::string_view v) { s.stall_warning = parse_seconds(v); },
     [](const Settings& s) { return std::to_string(s.stall_warning.count() / 1000.0); }},
    {"MULTICOMM_INSPECT_SIGNAL", "signal at which a rank prints what all ranks are doing, such as USR2 (0: none)",
     [](Settings& s, std::string_view v) { s.inspect_signal = parse_signal(v); },
     [](const Settings& s) { return signal_name(s.inspect_signal); }},
    {"MULTICOMM_TIMELINE",
     "folder in which each rank writes what its operations do, from the start, to rank<RANK>.json (default: none)",
     [](Settings& s, std::string_view v) { s.timeline = v; }, [](const Settings& s) { return s.timeline; }},
    {"MULTICOMM_LIBPMIX", "path of libpmix for the start-up under torchrun (default: the one that libmpi uses)",
     nullptr, [](const Settings&) { return std::string(); }},
};

}  // namespace

std::string Settings::shared_text() const {
  std::ostringstream text;
  text << "protocol=" << kProtocolVersion << " record=" << sizeof(Record)
       << " MULTICOMM_FUSION_BYTES=" << fusion_buffer_bytes
       << " MULTICOMM_FUSION_OPERATION_BYTES=" << fusion_operation_bytes
       << " MULTICOMM_DETERMINISTIC=" << (deterministic ? 1 : 0)
       << " MULTICOMM_ORDER=" << (strict_order ? "strict" : "relaxed") << " MULTICOMM_CUDA=" << cuda_name(cuda)
       << " MULTICOMM_STAGING_BYTES=" << staging_bytes << " MULTICOMM_CHUNK_ELEMENTS=" << chunk_elements;
  return text.str();
}

Settings read_settings(char** environment) {
  Settings settings;
  for (char** entry = environment; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    if (!text.starts_with("MULTICOMM_")) continue;
    const size_t equals = text.find('=');
    const std::string_view name = text.substr(0, equals);
    const Known* found = nullptr;
    for (const Known& known : kKnown)
      if (name == known.name) found = &known;
    if (found == nullptr) {
      std::string message = "multicomm: unknown setting " + std::string(name) + "; known are:";
      for (const Known& known : kKnown) message += std::string("\n  ") + known.name + ": " + known.meaning;
      throw std::invalid_argument(message);
    }
    if (found->parse == nullptr || equals == std::string_view::npos) continue;
    try {
      found->parse(settings, text.substr(equals + 1));
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument("multicomm: " + std::string(name) + ": " + error.what() + " (" + found->meaning +
                                  ")");
    }
  }
  return settings;
}

std::vector<SettingDescription> describe_settings(const Settings& settings) {
  std::vector<SettingDescription> list;
  for (const Known& known : kKnown) list.push_back({known.name, known.meaning, known.show(settings)});
  return list;
}

}  // namespace multicomm
