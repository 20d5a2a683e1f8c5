// The little of a key-value store that start-up needs; c10d's stores are adapted to it in process_group/.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace multicomm::bootstrap {

struct StoreTimeout : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Blocks until the key exists. Throws StoreTimeout when `timeout` passes, another std::exception when the store is
  // lost.
  virtual std::string get(const std::string& key, std::chrono::milliseconds timeout) = 0;
  virtual bool check(const std::string& key) = 0;
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  // A connection of its own, so that one thread's blocking read does not hold up another's calls.
  virtual std::unique_ptr<KeyValueStore> clone() = 0;
};

}  // namespace multicomm::bootstrap
