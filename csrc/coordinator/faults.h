// Faults that the simulation plants in the engine, to show that it finds them.
#pragma once

#include <cstdint>

namespace multicomm {

enum class Fault : uint8_t {
  kNone,
  kNoSecondPhase,        // device batches are launched as soon as a rank knows of them
  kProposalsRepeat,      // two proposals of one rank may be equal
  kNoValidation,         // what does not fit together is run
  kPlansFromLocalState,  // what is fused depends on what else has been submitted here
  kStartsOutOfOrder,     // a batch is started by a local event
  kLaunchWaits,          // a batch waits for a buffer
  kNobodyDrives,         // a waiter that leaves wakes nobody
};

#ifdef MULTICOMM_PLANTED_FAULTS
inline Fault planted_fault = Fault::kNone;
inline bool fault(Fault which) { return planted_fault == which; }
#else
constexpr bool fault(Fault) { return false; }
#endif

}  // namespace multicomm
