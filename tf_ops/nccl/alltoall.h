// Alltoall of a tensor on GPUs.
#pragma once

#include <cstdint>
#include <vector>

#include "tf_ops/nccl/communicator.h"

namespace keras_hvd::nccl {

struct AlltoallOptions {
  const void* input;
  void* output;
  int64_t row_bytes;
  std::vector<int64_t> sent;      // rows to each member
  std::vector<int64_t> received;  // rows from each member
};

// Enqueues it. The result is ready in the order of the communicator's stream.
Status Alltoall(const AlltoallOptions& options, Communicator* communicator);

}  // namespace keras_hvd::nccl
