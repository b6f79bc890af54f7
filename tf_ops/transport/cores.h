// How many cores a job may use on this host.
#ifndef KERAS_HVD_TF_OPS_TRANSPORT_CORES_H_
#define KERAS_HVD_TF_OPS_TRANSPORT_CORES_H_

#include "tf_ops/transport/segment.h"

namespace keras_hvd {

// Writes the cores that this process may run on into its block.
void PublishCores(RankBlock* block);

// The number of different cores that the ranks may run on together, and no more than
// the cgroup's quota pays for. All ranks must have published theirs.
int CountCores(Segment* segment);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_TRANSPORT_CORES_H_
