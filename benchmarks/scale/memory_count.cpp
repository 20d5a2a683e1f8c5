#include "memory_count.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace multicomm::scale {
namespace {

// One thread; plain data, since it is used before and after every constructor.
int32_t owner = MemoryCount::kSimulation;
MemoryCount::Bytes* bytes = nullptr;

struct alignas(__STDCPP_DEFAULT_NEW_ALIGNMENT__) Header {
  int64_t size;
  int32_t owner;
};

void* allocate(size_t size) {
  auto* header = static_cast<Header*>(std::malloc(sizeof(Header) + size));
  if (header == nullptr) throw std::bad_alloc();
  header->size = static_cast<int64_t>(size);
  header->owner = owner;
  if (owner >= 0) {
    MemoryCount::Bytes& b = bytes[owner];
    b.live += header->size;
    b.peak = std::max(b.peak, b.live);
  }
  return header + 1;
}

void release(void* memory) {
  if (memory == nullptr) return;
  Header* header = static_cast<Header*>(memory) - 1;
  if (header->owner >= 0) bytes[header->owner].live -= header->size;
  std::free(header);
}

}  // namespace

void MemoryCount::set_ranks(int ranks) { bytes = new Bytes[static_cast<size_t>(ranks)](); }
const MemoryCount::Bytes& MemoryCount::of(int rank) { return bytes[rank]; }

MemoryCount::Scope::Scope(int32_t rank) : before_(owner) { owner = rank; }
MemoryCount::Scope::~Scope() { owner = before_; }

}  // namespace multicomm::scale

void* operator new(size_t size) { return multicomm::scale::allocate(size); }
void operator delete(void* memory) noexcept { multicomm::scale::release(memory); }
void operator delete(void* memory, size_t) noexcept { multicomm::scale::release(memory); }
