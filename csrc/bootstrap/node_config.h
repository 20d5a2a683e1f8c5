// What a PMIx server has to know of the job, as text that travels over its socket.
#pragma once

#include <climits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "bootstrap/parse.h"

namespace multicomm::bootstrap {

inline constexpr size_t kLongestJobName = 80;  // with the node's number it must fit into a socket address
inline constexpr size_t kLongestHostName = 200;

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
    for (const int pid : pids) text << pid << '\n';
    return text.str();
  }

  // Throws std::runtime_error for anything that to_text() does not write.
  static NodeConfig from_text(std::string_view rest) {
    const std::string what = "the PMIx server's configuration";
    NodeConfig config;
    config.libpmix = take_field(rest, '\n', what);
    config.name = take_field(rest, '\n', what);
    if (!is_plain_name(config.name, kLongestJobName)) throw std::runtime_error(what + " has no name of a job");
    // Every node and every rank takes some of the text, so its length bounds them before anything is allocated.
    const std::string_view node = take_field(rest, ' ', what);
    const auto largest = static_cast<int64_t>(rest.size());
    const int64_t nodes = parse_number(take_field(rest, '\n', what), 1, largest, "the number of nodes");
    config.node = static_cast<int>(parse_number(node, 0, nodes - 1, "the number of a node"));
    for (int64_t n = 0; n < nodes; ++n) {
      config.hosts.emplace_back(take_field(rest, ' ', what));
      if (!is_plain_name(config.hosts.back(), kLongestHostName)) throw std::runtime_error(what + " has no host's name");
      std::string_view line = take_field(rest, '\n', what);
      const size_t space = line.find(' ');
      const int64_t count = parse_number(line.substr(0, space), 1, largest, "a node's number of ranks");
      line = space == std::string_view::npos ? std::string_view() : line.substr(space);
      std::vector<int>& ranks = config.ranks.emplace_back();
      while (!line.empty()) {
        line.remove_prefix(1);
        const size_t end = std::min(line.find(' '), line.size());
        ranks.push_back(static_cast<int>(parse_number(line.substr(0, end), 0, largest, "a rank")));
        line.remove_prefix(end);
      }
      if (static_cast<int64_t>(ranks.size()) != count) throw std::runtime_error(what + " counts ranks wrongly");
    }
    config.require_each_rank_once(what);
    while (!rest.empty())
      config.pids.push_back(static_cast<int>(parse_number(take_field(rest, '\n', what), 1, INT_MAX, "a process")));
    if (config.pids.size() != config.ranks[static_cast<size_t>(config.node)].size())
      throw std::runtime_error(what + " has not one process for each rank");
    return config;
  }

 private:
  void require_each_rank_once(const std::string& what) const {
    std::vector<bool> seen(static_cast<size_t>(world_size()));
    for (const auto& list : ranks) {
      for (const int rank : list) {
        if (static_cast<size_t>(rank) >= seen.size() || seen[static_cast<size_t>(rank)])
          throw std::runtime_error(what + " has not each rank once");
        seen[static_cast<size_t>(rank)] = true;
      }
    }
  }
};

}  // namespace multicomm::bootstrap
