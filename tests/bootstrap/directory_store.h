// A key-value store in a folder that all ranks see; stands in for c10d's stores.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "bootstrap/key_value_store.h"

class DirectoryStore final : public multicomm::bootstrap::KeyValueStore {
 public:
  explicit DirectoryStore(std::string folder) : folder_(std::move(folder)) {}

  void set(const std::string& key, const std::string& value) override {
    const Visit visit(*this, key);
    static std::atomic<int> count{0};
    const std::string fresh = path(key) + ".new" + std::to_string(getpid()) + "-" + std::to_string(count++);
    std::ofstream(fresh, std::ios::binary) << value;
    std::filesystem::rename(fresh, path(key));
  }

  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    const Visit visit(*this, key);
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (!std::filesystem::exists(path(key))) {
      require_folder();
      if (std::chrono::steady_clock::now() >= deadline) {
        throw multicomm::bootstrap::StoreTimeout("key '" + key + "' was not set in time");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return read(path(key));
  }

  bool check(const std::string& key) override {
    require_folder();
    return std::filesystem::exists(path(key));
  }

  int64_t add(const std::string& key, int64_t amount) override {
    const Visit visit(*this, key);
    const int fd = open((path(key) + ".counter").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) throw std::runtime_error("the store is lost");
    flock(fd, LOCK_EX);
    int64_t value = 0;
    if (pread(fd, &value, sizeof(value), 0) < 0) throw std::runtime_error("the store is lost");
    value += amount;
    if (pwrite(fd, &value, sizeof(value), 0) < 0) throw std::runtime_error("the store is lost");
    close(fd);
    return value;
  }

  std::unique_ptr<KeyValueStore> clone() override { return std::make_unique<DirectoryStore>(folder_); }

 private:
  // Fault injection: the rank kills itself once it has done with a key that contains the given text.
  class Visit {
   public:
    Visit(const DirectoryStore&, const std::string& key) : key_(key) {}
    ~Visit() {
      if (matches("PROBE_DIE_AFTER_KEY")) raise(SIGKILL);
    }

   private:
    bool matches(const char* variable) const {
      const char* text = std::getenv(variable);
      return text != nullptr && key_.find(text) != std::string::npos;
    }
    const std::string key_;
  };

  void require_folder() const {
    if (!std::filesystem::exists(folder_)) throw std::runtime_error("the store is lost");
  }
  std::string path(std::string key) const {
    for (char& c : key) c = c == '/' ? '+' : c;
    return folder_ + "/" + key;
  }
  static std::string read(const std::string& file) {
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }
  const std::string folder_;
};
