// Adasum: a sum of gradients that adapts to how well they agree (Maleki et al.,
// "Scaling Distributed Training with Adaptive Summation", 2020).
//
// For two vectors it is
//
//   (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b,
//
// which is their sum if they are orthogonal and their average if they are equal. More
// vectors are combined in a tree: members 0 and 1, 2 and 3; then these two; and so on.
#pragma once

#include <vector>

#include "tf_ops/collectives/allreduce.h"
#include "tf_ops/collectives/communicator.h"
#include "tf_ops/collectives/hosts_communicator.h"

namespace keras_hvd {

struct AdasumOptions {
  double prescale = 1;
  double postscale = 1;
  // The same types and sizes in the same order on every member. Tensors with elements
  // have a floating type. Each tensor is a vector of its own.
  std::vector<AllreduceTensor> tensors;
};

// Whether this number of members can be halved down to one.
inline bool CanAdasum(int members) {
  return members > 0 && (members & (members - 1)) == 0;
}

// All members get the same bits, whatever else is combined with a tensor. 8- and 16-bit
// floats are computed in float32 and rounded once at the end. Products and their sums
// are computed in double. Returns false if the job failed meanwhile.
template <typename Group>  // a Communicator, or a HostsCommunicator
bool Adasum(const AdasumOptions& options, Group* communicator);

}  // namespace keras_hvd
