// What the fuzz targets share. A target defines seeds() and LLVMFuzzerTestOneInput, libFuzzer's interface; it is linked
// with libFuzzer where the compiler has it, else with standalone.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bootstrap/key_value_store.h"

namespace fuzz {

// Inputs to start from: well-formed ones that reach deep, and those that once found a fault.
std::vector<std::string> seeds();

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz: not so: %s\n", what);
  std::abort();
}

// The input as numbers; zeros once it is used up.
class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}
  uint8_t byte() {
    if (rest_.empty()) return 0;
    const auto value = static_cast<uint8_t>(rest_.front());
    rest_.remove_prefix(1);
    return value;
  }
  uint16_t word() { return static_cast<uint16_t>(byte() | byte() << 8); }
  bool done() const { return rest_.empty(); }
  // Up to the next `end`, or all that is left.
  std::string field(char end) {
    const std::string value(rest_.substr(0, rest_.find(end)));
    rest_.remove_prefix(std::min(rest_.size(), value.size() + 1));
    return value;
  }
  std::string rest() {
    std::string all(rest_);
    rest_ = {};
    return all;
  }

 private:
  std::string_view rest_;
};

// A store in which anybody can have written anything: what is asked for is taken from the input.
class HostileStore final : public multicomm::bootstrap::KeyValueStore {
 public:
  using Values = std::map<std::string, std::string>;
  HostileStore(std::shared_ptr<Reader> input, std::shared_ptr<Values> values)
      : input_(std::move(input)), values_(std::move(values)) {}
  void set(const std::string& key, const std::string& value) override { values_->try_emplace(key, value); }
  std::string get(const std::string& key, std::chrono::milliseconds) override {
    if (!check(key)) throw multicomm::bootstrap::StoreTimeout("key '" + key + "' was not set in time");
    return values_->at(key);
  }
  bool check(const std::string& key) override {
    if (values_->count(key) > 0) return true;
    if (input_->done() || input_->byte() == kMissing) return false;
    values_->emplace(key, input_->field(kEnd));
    return true;
  }
  int64_t add(const std::string& key, int64_t amount) override { return counters_[key] += amount; }
  std::unique_ptr<multicomm::bootstrap::KeyValueStore> clone() override {
    return std::make_unique<HostileStore>(input_, values_);
  }
  static constexpr uint8_t kMissing = '!';
  static constexpr char kEnd = '\x01';

 private:
  const std::shared_ptr<Reader> input_;
  const std::shared_ptr<Values> values_;
  std::map<std::string, int64_t> counters_;
};

}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// FUZZ_WRITE_SEEDS=FOLDER: writes the seeds there, and nothing else.
extern "C" [[gnu::used]] inline int LLVMFuzzerInitialize(int*, char***) {
  const char* folder = std::getenv("FUZZ_WRITE_SEEDS");
  if (folder == nullptr) return 0;
  std::filesystem::create_directories(folder);
  int number = 0;
  for (const std::string& seed : fuzz::seeds())
    std::ofstream(std::string(folder) + "/seed" + std::to_string(number++), std::ios::binary) << seed;
  std::exit(0);
}
