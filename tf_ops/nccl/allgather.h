// Allgather of tensors on GPUs.
#pragma once

#include <cstdint>
#include <vector>

#include "tf_ops/nccl/communicator.h"

namespace keras_hvd::nccl {

struct AllgatherTensor {
  const void* input;
  void* output;
  int64_t row_bytes;
  std::vector<int64_t> rows;  // of each member
};

struct AllgatherOptions {
  std::vector<AllgatherTensor> tensors;
};

// Enqueues it. The results are ready in the order of the communicator's stream.
Status Allgather(const AllgatherOptions& options, Communicator* communicator);

}  // namespace keras_hvd::nccl
