#include "bootstrap/introductions.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "bootstrap/host_identity.h"
#include "bootstrap/parse.h"
#include "bootstrap/scoped_environment.h"

namespace multicomm::bootstrap {
namespace {

struct Introduction {
  int pid;
  std::string job;
  std::string identity;
};

// Not to be guessed: libpmix listens on the loopback, where it believes whoever knows the job's name. Its last part is
// in no address that other users can read (see wire::server_address).
std::string new_job_name() {
  uint64_t drawn[2];
  if (getrandom(drawn, sizeof(drawn), 0) != static_cast<ssize_t>(sizeof(drawn)))
    throw std::runtime_error("no random number for the job's name: " + std::string(std::strerror(errno)));
  char text[80];
  std::snprintf(text, sizeof(text), "multicomm-%d-%016llx-%016llx", getpid(), static_cast<unsigned long long>(drawn[0]),
                static_cast<unsigned long long>(drawn[1]));
  return text;
}

Introduction parse(std::string_view text, size_t rank) {
  const std::string who = "rank " + std::to_string(rank);
  const std::string what = "what " + who + " published of itself";
  std::string_view rest = text;
  Introduction result{};
  result.pid = static_cast<int>(parse_number(take_field(rest, ' ', what), 1, INT_MAX, "the process of " + who));
  result.job = take_field(rest, ' ', what);
  result.identity = rest;
  if (!is_plain_name(result.job, kLongestJobName) || rest.empty())
    throw std::runtime_error(what + " is no introduction: " + quoted(text));
  return result;
}

// A host's name for PMIx. Two nodes may carry one name (containers); PMIx wants them told apart.
std::string name_of_host(const std::string& identity, const std::vector<std::string>& taken) {
  std::string name = identity.substr(0, std::min(identity.find('|'), kLongestHostName / 2));
  std::replace_if(name.begin(), name.end(), [](char c) { return !is_plain(c); }, '-');
  const auto is_taken = [&](const std::string& text) {
    return text.empty() || std::find(taken.begin(), taken.end(), text) != taken.end();
  };
  std::string unique = name;
  for (size_t n = taken.size(); is_taken(unique); ++n) unique = name + "-node" + std::to_string(n);
  return unique;
}

}  // namespace

std::string introduction() { return std::to_string(getpid()) + ' ' + new_job_name() + ' ' + host_identity(); }

NodeConfig arrange_nodes(const std::vector<std::string>& introductions, int rank) {
  NodeConfig config;
  std::map<std::string, size_t> index;
  std::vector<std::vector<int>> pids;
  for (size_t r = 0; r < introductions.size(); ++r) {
    const Introduction one = parse(introductions[r], r);
    if (r == 0) config.name = one.job;  // each proposes a name for the job; the lowest rank's is taken
    const auto [it, fresh] = index.emplace(one.identity, config.hosts.size());
    if (fresh) {
      config.hosts.push_back(name_of_host(one.identity, config.hosts));
      config.ranks.emplace_back();
      pids.emplace_back();
    }
    config.ranks[it->second].push_back(static_cast<int>(r));
    pids[it->second].push_back(one.pid);
    if (static_cast<int>(r) == rank) config.node = static_cast<int>(it->second);
  }
  config.pids = std::move(pids[static_cast<size_t>(config.node)]);
  return config;
}

std::map<std::string, std::string> read_environment(const std::string& block) {
  std::map<std::string, std::string> environment;
  for (std::string_view rest = block; !rest.empty();) {
    const std::string_view entry = take_field(rest, '\0', "the environment of the PMIx server");
    const size_t equals = entry.find('=');
    if (equals == std::string_view::npos || !is_mpi_variable(entry.substr(0, equals)))
      throw std::runtime_error("the environment of the PMIx server has no variable of MPI's in " + quoted(entry));
    environment[std::string(entry.substr(0, equals))] = entry.substr(equals + 1);
  }
  return environment;
}

}  // namespace multicomm::bootstrap
