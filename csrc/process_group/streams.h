// The caller's streams.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "transport/device/launcher.h"

namespace multicomm {

// A recorded graph would launch its collectives again and again with nobody to agree with, and in an order of its own.
// `where`: what is refused.
template <typename Guard, typename Where>
void refuse_capture(const Guard& guard, const c10::Stream& stream, const Where& where) {
  bool capturing = false;
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    capturing = guard.isStreamCapturing(stream);
  } else if (stream.device_type() == c10::DeviceType::CUDA) {  // an older torch cannot tell, CUDA can
    using Ask = int (*)(void*, int*);
    static const auto ask = reinterpret_cast<Ask>(device::loaded_symbol("libcudart", "cudaStreamIsCapturing"));
    int status = 0;  // cudaStreamCaptureStatusNone
    capturing = ask != nullptr && ask(device::native_handle(stream), &status) == 0 && status != 0;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!capturing, where,
                              " inside the recording of a CUDA graph is not supported: multicomm agrees with the peers "
                              "on every launch, which a graph cannot repeat. Record the computation between the "
                              "collectives, or use a group of the nccl backend there");
}

}  // namespace multicomm
