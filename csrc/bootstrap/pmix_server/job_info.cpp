#include "bootstrap/pmix_server/job_info.h"

#include <thread>

namespace multicomm::pmix {
namespace {

std::string join(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) text += (text.empty() ? "" : ",") + std::to_string(number);
  return text;
}

}  // namespace

JobInfo::JobInfo(const bootstrap::NodeConfig& config, const std::string& folder) {
  const auto world = static_cast<size_t>(config.world_size());
  const auto& local = config.ranks[static_cast<size_t>(config.node)];
  std::string hosts, map;
  for (size_t node = 0; node < config.hosts.size(); ++node) {
    hosts += (node > 0 ? "," : "") + config.hosts[node];
    map += (node > 0 ? ";" : "") + join(config.ranks[node]);
  }
  job_.add_uint32("pmix.job.size", world);
  job_.add_uint32("pmix.univ.size", world);
  job_.add_uint32("pmix.max.size", world);
  job_.add_uint32("pmix.num.nodes", config.hosts.size());
  job_.add_uint32("pmix.job.napps", 1);
  job_.add("pmix.nmap", "raw:" + hosts);
  job_.add("pmix.pmap", "raw:" + map);
  job_.add_uint32("pmix.local.size", local.size());
  job_.add("pmix.lpeers", join(local));
  job_.add("pmix.jobid", config.name);
  job_.add("pmix.tmpdir", folder);
  job_.add("pmix.nsdir", folder + "/job");
  if (local.size() > std::thread::hardware_concurrency()) job_.add_flag("pmix.ndosub", true);  // more ranks than cores
  for (size_t node = 0; node < config.ranks.size(); ++node) {
    for (size_t i = 0; i < config.ranks[node].size(); ++i) {
      const int rank = config.ranks[node][i];
      InfoList& info = ranks_.emplace_back();
      info.add_rank("pmix.rank", static_cast<Rank>(rank));
      info.add_uint16("pmix.lrank", i);
      info.add_uint16("pmix.nrank", i);
      info.add_uint32("pmix.nodeid", node);
      info.add("pmix.hname", config.hosts[node]);
      info.add_uint32("pmix.appnum", 0);
      info.add("pmix.pdir", folder + "/job/" + std::to_string(rank));
      arrays_.push_back({kInfo, info.size(), info.data()});
      job_.add_array("pmix.pdata", &arrays_.back());
    }
  }
}

}  // namespace multicomm::pmix
