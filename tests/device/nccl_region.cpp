#include "nccl_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <random>

namespace multicomm::tests::nccl {
namespace {

// What the 128 bytes of an id hold.
struct Id {
  char magic[8];
  int32_t pid;
  int32_t fd;
  uint64_t nonce;
};
constexpr char kMagic[8] = "ncclDbl";

// Never destroyed: a thread may outlive main().
std::mutex& mutex() { return *new std::mutex; }
std::mutex& g_mutex = mutex();
std::map<uint64_t, int>& g_open = *new std::map<uint64_t, int>;  // fd by nonce; under g_mutex

Id read(const ncclUniqueId& id) {
  Id result;
  std::memcpy(&result, id.internal, sizeof result);
  return result;
}

Region* map(int fd) {
  void* at = mmap(nullptr, sizeof(Region), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return at == MAP_FAILED ? nullptr : static_cast<Region*>(at);
}

}  // namespace

bool create_region(ncclUniqueId* id) {
  const int fd = memfd_create("nccl_double", MFD_CLOEXEC);
  if (fd < 0) return false;
  Region* region = ftruncate(fd, sizeof(Region)) == 0 ? map(fd) : nullptr;  // sparse: pages come when touched
  if (region == nullptr) return ::close(fd), false;
  std::random_device random;
  Id made{{}, getpid(), fd, (uint64_t{random()} << 32 | random()) | 1};
  std::memcpy(made.magic, kMagic, sizeof kMagic);
  region->nonce.store(made.nonce);
  munmap(region, sizeof(Region));
  *id = {};
  std::memcpy(id->internal, &made, sizeof made);
  const std::scoped_lock lock(g_mutex);
  g_open[made.nonce] = fd;
  return true;
}

std::shared_ptr<Region> open_region(const ncclUniqueId& id) {
  const Id wanted = read(id);
  if (std::memcmp(wanted.magic, kMagic, sizeof kMagic) != 0) return nullptr;
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", wanted.pid, wanted.fd);
  const int fd = ::open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return nullptr;
  // The descriptor's number may be someone else's by now: a file too small to map, or another communicator.
  const bool large = lseek(fd, 0, SEEK_END) == static_cast<off_t>(sizeof(Region));
  Region* region = large ? map(fd) : nullptr;
  ::close(fd);
  if (region == nullptr) return nullptr;
  std::shared_ptr<Region> result(region, [](Region* at) { munmap(at, sizeof(Region)); });
  return result->nonce.load() == wanted.nonce ? result : nullptr;
}

void close_region(const ncclUniqueId& id) {
  const std::scoped_lock lock(g_mutex);
  const auto at = g_open.find(read(id).nonce);
  if (at == g_open.end()) return;
  ::close(at->second);
  g_open.erase(at);
}

uint64_t nonce_of(const ncclUniqueId& id) { return read(id).nonce; }

}  // namespace multicomm::tests::nccl
