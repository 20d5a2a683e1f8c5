#include "transport/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

namespace multicomm::shm {

std::unique_ptr<Segment> Segment::map(int descriptor, size_t members) {
  void* memory = mmap(nullptr, members * sizeof(Part), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) {
    ::close(descriptor);
    return nullptr;
  }
  // The pages of a fresh memory file are zero, which is the counters' initial value.
  return std::unique_ptr<Segment>(new Segment(descriptor, static_cast<Part*>(memory), members));
}

std::unique_ptr<Segment> Segment::create(size_t members) {
  const int descriptor = memfd_create("multicomm", MFD_CLOEXEC);
  if (descriptor < 0) return nullptr;
  // Other users cannot open it anyway, but its mode shall say so too.
  if (fchmod(descriptor, S_IRUSR | S_IWUSR) != 0 ||
      ftruncate(descriptor, static_cast<off_t>(members * sizeof(Part))) != 0) {
    ::close(descriptor);
    return nullptr;
  }
  return map(descriptor, members);
}

std::unique_ptr<Segment> Segment::open(const Address& address, size_t members) {
  const std::string path = "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.descriptor);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return nullptr;
  struct stat status{};  // of another size, it is not what was meant, and access to it could be the process's end
  if (fstat(descriptor, &status) != 0 || static_cast<size_t>(status.st_size) != members * sizeof(Part)) {
    ::close(descriptor);
    return nullptr;
  }
  return map(descriptor, members);
}

Segment::Address Segment::address() const { return {getpid(), descriptor_}; }

void Segment::close_descriptor() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

Segment::~Segment() {
  close_descriptor();
  munmap(parts_, members_ * sizeof(Part));
}

}  // namespace multicomm::shm
