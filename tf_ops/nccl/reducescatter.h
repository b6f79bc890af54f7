// Reducescatter of tensors on GPUs.
#pragma once

#include "tf_ops/collectives/reducescatter.h"
#include "tf_ops/nccl/communicator.h"

namespace keras_hvd::nccl {

// Enqueues it. The results are ready in the order of the communicator's stream. The
// reduction must satisfy CanReduce.
Status Reducescatter(const ReducescatterOptions& options, Communicator* communicator);

}  // namespace keras_hvd::nccl
