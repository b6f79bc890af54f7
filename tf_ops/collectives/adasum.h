// Adasum: a sum of gradients that adapts to how much they say the same (Maleki et al.,
// "Scaling Distributed Training with Adaptive Summation", 2020).
//
// Of two vectors it is
//
//   (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b,
//
// their sum where they are orthogonal and their average where they are equal. Of more,
// halves are combined first: members 0 and 1, 2 and 3; then these two; and so on.
#ifndef KERAS_HVD_TF_OPS_COLLECTIVES_ADASUM_H_
#define KERAS_HVD_TF_OPS_COLLECTIVES_ADASUM_H_

#include <vector>

#include "tf_ops/collectives/allreduce.h"
#include "tf_ops/collectives/communicator.h"

namespace keras_hvd {

struct AdasumOptions {
  double prescale = 1;
  double postscale = 1;
  // The same types and sizes in the same order on every member. A tensor with elements
  // is of a floating type; each is a vector of its own.
  std::vector<AllreduceTensor> tensors;
};

// Whether so many members can be halved down to one.
inline bool CanAdasum(int members) {
  return members > 0 && (members & (members - 1)) == 0;
}

// The bits are the same on all members, whatever else is combined with a tensor. 8- and
// 16-bit floats are computed in float32 with one rounding at the end, products and
// their sums in double. Returns false if the job failed meanwhile.
bool Adasum(const AdasumOptions& options, Communicator* communicator);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COLLECTIVES_ADASUM_H_
