// The caller's streams.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

namespace multicomm {

// A recorded graph would launch its collectives again and again with nobody to agree with, and in an order of its own.
// `where`: what is refused. (torch before 2.12 cannot tell whether a stream is being recorded.)
template <typename Guard, typename Where>
void refuse_capture(const Guard& guard, const c10::Stream& stream, const Where& where) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    TORCH_CHECK_NOT_IMPLEMENTED(!guard.isStreamCapturing(stream), where,
                                " inside the recording of a CUDA graph is not supported: multicomm agrees with the "
                                "peers on every launch, which a graph cannot repeat. Record the computation between "
                                "the collectives, or use a group of the nccl backend there");
  }
}

}  // namespace multicomm
