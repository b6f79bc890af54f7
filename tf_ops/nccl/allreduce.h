// Allreduce of tensors on GPUs.
#pragma once

#include "tf_ops/collectives/allreduce.h"
#include "tf_ops/nccl/communicator.h"

namespace keras_hvd::nccl {

// Enqueues it. The results are ready in the order of the communicator's stream. The
// reduction must satisfy CanReduce, and the other options do not matter.
Status Allreduce(const AllreduceOptions& options, Communicator* communicator);

}  // namespace keras_hvd::nccl
