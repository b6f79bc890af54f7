// Allgather: every member gets all members' tensors, one after another.
#pragma once

#include <functional>
#include <vector>

#include "tf_ops/collectives/communicator.h"
#include "tf_ops/collectives/hosts_communicator.h"

namespace keras_hvd {

// One of the tensors that are gathered together.
struct AllgatherTensor {
  const void* input = nullptr;
  int64_t rows = 0;       // this member's first dimension; may differ between members
  int64_t row_bytes = 0;  // the same on every member
  // Returns memory for the result once the members' first dimensions are known, or
  // null.
  std::function<void*(const std::vector<int64_t>& rows)> allocate;
};

struct AllgatherOptions {
  std::vector<AllgatherTensor> tensors;  // in the same order on every member
};

// Returns false if the job failed meanwhile. A member without memory for a result still
// takes part, so the others get theirs.
template <typename Group>  // a Communicator, or a HostsCommunicator
bool Allgather(const AllgatherOptions& options, Group* communicator);

}  // namespace keras_hvd
