#include "bootstrap/host_identity.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

namespace multicomm::bootstrap {

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

std::string boot_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot;
}

std::string host_identity() {
  std::string identity = host_name() + '|' + boot_id();
  for (const char* path : {"/proc/self/ns/net", "/proc/self/ns/pid", "/dev/shm"}) {
    struct stat status{};
    if (stat(path, &status) == 0) {
      identity += '|' + std::to_string(status.st_dev) + ':' + std::to_string(status.st_ino);
    }
  }
  return identity;
}

}  // namespace multicomm::bootstrap
