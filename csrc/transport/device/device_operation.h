// An operation on the tensors of a device, as its plane sees it.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>

#include <memory>
#include <optional>

#include "coordinator/operation.h"

namespace multicomm {

// An event that is destroyed with its device current: else the thread that lets go of it, which may have none, would
// make a context of its own on device 0.
inline std::shared_ptr<c10::Event> make_event(c10::Device device) {
  return {new c10::Event(device.type()), [device](c10::Event* event) {
            const c10::OptionalDeviceGuard current(device);
            delete event;
          }};
}

// The caller writes `device` and `ready`, the launcher `event`, before the operation is known as launched.
class DeviceOperation : public Operation {
 public:
  std::optional<c10::Device> device;  // none: all its tensors are on the CPU
  std::shared_ptr<c10::Event> ready;  // on the stream that was current when it was submitted
  std::shared_ptr<c10::Event> event;  // behind it on the communication stream
};

}  // namespace multicomm
