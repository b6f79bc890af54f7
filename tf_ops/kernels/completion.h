// Runs TensorFlow's continuations of finished collectives on a dedicated thread.
//
// Ops after a collective must never run on the engine's thread: they may take long, and
// may submit the next collective and wait for it. A TensorFlow pool is not enough: if
// its queue (1024 closures) is full, it runs a closure on the calling thread, and a
// step with thousands of tensors fills the queue.
#pragma once

#include <functional>

#include "absl/status/status.h"

namespace keras_hvd {

// Starts the thread if it does not run, or says why the system has no room for it. Call
// it before anything is submitted whose end calls CompleteLater.
absl::Status StartCompletionThread();

// Runs `continuation` soon on the completion thread, in the order of the calls. Blocks
// only on a short lock.
void CompleteLater(std::function<void()> continuation);

}  // namespace keras_hvd
