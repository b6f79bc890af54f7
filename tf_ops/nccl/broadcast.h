// Broadcast of a tensor on GPUs.
#pragma once

#include "tf_ops/collectives/broadcast.h"
#include "tf_ops/nccl/communicator.h"

namespace keras_hvd::nccl {

// Enqueues it. The result is ready in the order of the communicator's stream.
Status Broadcast(const BroadcastOptions& options, Communicator* communicator);

}  // namespace keras_hvd::nccl
