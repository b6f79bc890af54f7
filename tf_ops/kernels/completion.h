// Runs TensorFlow's continuations of finished collectives on a thread of their own.
//
// What follows an op in a graph must never run on the engine's thread: it may take
// long, and it may submit the next collective and wait for it. Scheduling it on a
// TensorFlow pool is not enough: such a pool runs a closure on the calling thread when
// its queue (1024 closures) is full, which a step with thousands of tensors reaches.
#ifndef KERAS_HVD_TF_OPS_KERNELS_COMPLETION_H_
#define KERAS_HVD_TF_OPS_KERNELS_COMPLETION_H_

#include <functional>

namespace keras_hvd {

// Has `continuation` called soon, in the order of the calls, on the completion thread.
// Does not block on anything but a short lock.
void CompleteLater(std::function<void()> continuation);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_KERNELS_COMPLETION_H_
