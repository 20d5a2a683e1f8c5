// What the two doubles know of each other: a stream of the simulated device.
#pragma once

namespace multicomm::tests {

// c10::Stream::native_handle() of a simulated device points to one. It runs what is enqueued, one after the other, on a
// thread of its own.
struct DeviceStream {
  // Any thread. `run(argument)` is called once, after everything enqueued before.
  void (*enqueue)(DeviceStream* self, void (*run)(void*), void* argument);
};

}  // namespace multicomm::tests
