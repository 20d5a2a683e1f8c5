// The node's PMIx server, as the rank that starts it sees it.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>

#include "bootstrap/node_config.h"

namespace multicomm::bootstrap {

class ServerProcess {
 public:
  // Starts the program and waits until it serves. Throws std::runtime_error.
  ServerProcess(const std::string& program, const NodeConfig& config, std::chrono::steady_clock::time_point deadline);
  ~ServerProcess();  // quits
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  int socket() const { return socket_; }
  // For the node's ranks: entries NAME=VALUE, each with a NUL behind it.
  const std::string& environment() const { return environment_; }
  // Waits, bounded, for the server to end by itself after its last rank.
  void stop();
  // Tells it to end now, whether its ranks have finalised or not, and closes the connection to it.
  void quit();

 private:
  void spawn(const std::string& program);
  bool ended_within(std::chrono::milliseconds bound);
  void remove_folder();

  int socket_ = -1;
  pid_t pid_ = -1;
  bool reaped_ = false;
  std::string folder_;
  std::string environment_;
};

}  // namespace multicomm::bootstrap
