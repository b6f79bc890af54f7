// Reducescatter: every member gets some rows of the reduction of all members' tensors.
#pragma once

#include <vector>

#include "tf_ops/collectives/communicator.h"
#include "tf_ops/collectives/hosts_communicator.h"
#include "tf_ops/collectives/reduce.h"

namespace keras_hvd {

// One of the tensors that are reduced together.
struct ReducescatterTensor {
  DataType dtype;
  int64_t rows;          // of the input
  int64_t row_elements;  // in one of them
  const void* input;
  void* output;  // this member's rows, as PartStart divides them; overlaps no input
};

struct ReducescatterOptions {
  Reduction reduction;
  // The same types and sizes in the same order on every member.
  std::vector<ReducescatterTensor> tensors;
};

// The bits are the same as Allreduce's. Returns false if the job failed meanwhile; the
// outputs are then undefined.
bool Reducescatter(const ReducescatterOptions& options, Communicator* communicator);
bool Reducescatter(const ReducescatterOptions& options, HostsCommunicator* hosts);

}  // namespace keras_hvd
