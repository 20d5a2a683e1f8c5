// The job as PMIx attributes.
#pragma once

#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "bootstrap/node_config.h"
#include "bootstrap/pmix_server/pmix_abi.h"

namespace multicomm::pmix {

// A growing array of key-value pairs that owns its strings.
class InfoList {
 public:
  void add(const char* key, const std::string& value) { append(key, kString).string = keep(value); }
  void add_flag(const char* key, bool value) { append(key, kBool).flag = value; }
  void add_uint16(const char* key, size_t value) { append(key, kUint16).uint16 = static_cast<uint16_t>(value); }
  void add_uint32(const char* key, size_t value) { append(key, kUint32).uint32 = static_cast<uint32_t>(value); }
  void add_rank(const char* key, Rank value) { append(key, kProcRank).rank = value; }
  void add_array(const char* key, DataArray* value) { append(key, kDataArray).array = value; }
  Info* data() { return list_.data(); }
  size_t size() const { return list_.size(); }

 private:
  decltype(Value::data)& append(const char* key, uint16_t type) {
    Info info;
    std::memset(&info, 0, sizeof(info));
    std::strncpy(info.key, key, sizeof(info.key) - 1);
    info.value.type = type;
    list_.push_back(info);
    return list_.back().value.data;
  }
  char* keep(const std::string& text) {
    strings_.push_back(text);
    return strings_.back().data();
  }
  std::vector<Info> list_;
  std::deque<std::string> strings_;
};

// Everything about the job that MPI_Init asks for: sizes, nodes, who is where, each rank's place on its node.
class JobInfo {
 public:
  JobInfo(const bootstrap::NodeConfig& config, const std::string& folder);
  Info* data() { return job_.data(); }
  size_t size() const { return job_.size(); }

 private:
  InfoList job_;
  std::deque<InfoList> ranks_;
  std::deque<DataArray> arrays_;
};

}  // namespace multicomm::pmix
