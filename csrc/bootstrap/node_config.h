// What a PMIx server has to know of the job, as text that travels over its socket.
#pragma once

#include <sstream>
#include <string>
#include <vector>

namespace multicomm::bootstrap {

struct NodeConfig {
  std::string libpmix;                  // path of the library that libmpi uses: versions must match
  std::string name;                     // PMIx namespace of the job
  int node = 0;                         // this server's
  std::vector<std::string> hosts;       // per node
  std::vector<std::vector<int>> ranks;  // per node
  std::vector<int> pids;                // of this node's ranks, in their order

  int world_size() const {
    size_t size = 0;
    for (const auto& list : ranks) size += list.size();
    return static_cast<int>(size);
  }

  std::string to_text() const {
    std::ostringstream text;
    text << libpmix << '\n' << name << '\n' << node << ' ' << hosts.size() << '\n';
    for (size_t n = 0; n < hosts.size(); ++n) {
      text << hosts[n] << ' ' << ranks[n].size();
      for (const int rank : ranks[n]) text << ' ' << rank;
      text << '\n';
    }
    for (const int pid : pids) text << pid << ' ';
    return text.str();
  }

  static NodeConfig from_text(const std::string& body) {
    NodeConfig config;
    std::istringstream text(body);
    std::getline(text, config.libpmix);
    std::getline(text, config.name);
    size_t nodes = 0;
    text >> config.node >> nodes;
    config.hosts.resize(nodes);
    config.ranks.resize(nodes);
    for (size_t n = 0; n < nodes; ++n) {
      size_t count = 0;
      text >> config.hosts[n] >> count;
      config.ranks[n].resize(count);
      for (int& rank : config.ranks[n]) text >> rank;
    }
    for (int pid = 0; text >> pid;) config.pids.push_back(pid);
    return config;
  }
};

}  // namespace multicomm::bootstrap
