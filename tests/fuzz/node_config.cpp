// The server's configuration, of any content: refused, or one from which the server can be started.
#include "bootstrap/node_config.h"

#include "bootstrap/pmix_server/job_info.h"
#include "fuzz.h"

using multicomm::bootstrap::NodeConfig;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  NodeConfig config;
  try {
    config = NodeConfig::from_text({reinterpret_cast<const char*>(data), size});
  } catch (const std::runtime_error&) {
    return 0;
  }
  const auto& local = config.ranks[static_cast<size_t>(config.node)];
  fuzz::require(local.size() == config.pids.size() && !config.hosts[static_cast<size_t>(config.node)].empty(),
                "a process for each local rank");
  multicomm::pmix::JobInfo info(config, "/tmp/folder");
  fuzz::require(info.size() > config.hosts.size(), "attributes of the job");
  const NodeConfig again = NodeConfig::from_text(config.to_text());
  fuzz::require(again.name == config.name && again.node == config.node && again.hosts == config.hosts &&
                    again.ranks == config.ranks && again.pids == config.pids,
                "the same again");
  return 0;
}

std::vector<std::string> fuzz::seeds() {
  return {"/lib/libpmix.so.2\nmulticomm-7-0f-0a\n0 1\nhost 2 0 1\n100\n101\n",
          "/lib/libpmix.so.2\njob\n1 2\nhost 2 0 2\nhost-node1 1 1\n101\n",
          "\njob\n0 18446744073709551615\nhost 1 0\n1\n",
          "\njob\n0 1\nhost 99999999999 0\n1\n",
          "\njob\n7 1\nhost 1 0\n1\n",
          "\njob\n0 1\nhost 2 0 0\n1\n2\n",
          "\njob\n0 1\nhost 1 0\n0\n",
          "\njob\n0 1\nhost 1 0\n",
          ""};
}
