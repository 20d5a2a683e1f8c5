// multicomm-pmix-server: gives the ranks of one node the PMIx service that MPI_Init needs where no MPI launcher does.
// Started by the node's lowest rank with a socket as descriptor 3; not meant to be run by hand.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <string>

#include "bootstrap/pmix_server/server.h"
#include "bootstrap/scoped_environment.h"
#include "bootstrap/wire.h"

namespace {

constexpr int kSocket = multicomm::bootstrap::wire::kServerSocket;

// Whatever the rank had open (its store's connections, its log files) must not stay open here.
void close_inherited() {
  rlimit limit{};
  const bool known = getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  const int end = known && limit.rlim_cur < 65536 ? static_cast<int>(limit.rlim_cur) : 65536;
  for (int fd = kSocket + 1; fd < end; ++fd) close(fd);
  fcntl(kSocket, F_SETFD, FD_CLOEXEC);
}

// An outer launcher's variables would make libpmix a client of that launcher.
void clean_environment() {
  using namespace multicomm::bootstrap;
  for (const std::string& name : names_of(is_launcher_variable)) unsetenv(name.c_str());
}

}  // namespace

int main() {
  namespace wire = multicomm::bootstrap::wire;
  // It has a session of its own, and a polite end of everything on the node is for the ranks first: it outlives them
  // just long enough to clean up behind them.
  for (const int polite : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) signal(polite, SIG_IGN);
  umask(S_IRWXG | S_IRWXO);  // whatever is made here or by libpmix is the job's user's alone
  close_inherited();
  clean_environment();
  wire::Message message;
  if (!wire::receive(kSocket, message) || message.type != 'C') {
    std::fprintf(stderr, "multicomm-pmix-server is started by multicomm itself, not by hand\n");
    return 2;
  }
  try {
    const auto config = multicomm::bootstrap::NodeConfig::from_text(message.body);
    setenv("PMIX_MCA_gds", "hash", 0);  // the shared-memory store must map at one fixed address in every rank
    setenv("PMIX_HOSTNAME", config.hosts[static_cast<size_t>(config.node)].c_str(), 1);  // node names may be made up
    multicomm::pmix::Server server(config, kSocket);
    const std::string environment = server.start();
    // With nobody there to read it, the ranks may be gone or not: run() finds out.
    wire::send(kSocket, 'R', 0, server.folder() + '\0' + environment);
    server.run();
    server.stop();
  } catch (const std::exception& error) {
    wire::send(kSocket, 'E', 0, error.what());
    return 1;
  }
  _exit(0);  // libpmix's threads may still be ending
}
