// Alltoall: every member gets some rows of each member's tensor.
#pragma once

#include <functional>
#include <vector>

#include "tf_ops/collectives/communicator.h"
#include "tf_ops/collectives/hosts_communicator.h"

namespace keras_hvd {

struct AlltoallOptions {
  const void* input = nullptr;
  // How many rows go to each member, in the order of the members.
  std::vector<int64_t> splits;
  int64_t row_bytes = 0;  // the same on every member
  // Returns memory for the result once the number of rows from each member is known, or
  // null. It overlaps no input.
  std::function<void*(const std::vector<int64_t>& rows)> allocate;
};

// Returns false if the job failed meanwhile. A member without memory for the result
// still takes part, so the others get theirs.
template <typename Group>  // a Communicator, or a HostsCommunicator
bool Alltoall(const AlltoallOptions& options, Group* communicator);

}  // namespace keras_hvd
