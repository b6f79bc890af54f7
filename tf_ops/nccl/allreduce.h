// Allreduce of tensors on GPUs.
#pragma once

#include <vector>

#include "tf_ops/collectives/allreduce.h"
#include "tf_ops/nccl/communicator.h"

namespace keras_hvd::nccl {

struct AllreduceOptions {
  Reduction reduction;  // must satisfy CanReduce
  // The same types and sizes in the same order on every member, on the device.
  std::vector<AllreduceTensor> tensors;
};

// Enqueues it. The results are ready in the order of the communicator's stream.
Status Allreduce(const AllreduceOptions& options, Communicator* communicator);

}  // namespace keras_hvd::nccl
