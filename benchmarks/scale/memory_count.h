// Whose memory is whose: every allocation of this program belongs to a rank's engine, or to the simulation.
#pragma once

#include <cstdint>
#include <vector>

namespace multicomm::scale {

class MemoryCount {
 public:
  static constexpr int32_t kSimulation = -1;
  struct Bytes {
    int64_t live = 0;
    int64_t peak = 0;
  };
  static void set_ranks(int ranks);  // once
  static const Bytes& of(int rank);

  // What is allocated within is `rank`'s.
  class Scope {
   public:
    explicit Scope(int32_t rank);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const int32_t before_;
  };
};

}  // namespace multicomm::scale
