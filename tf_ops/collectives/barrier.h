// Barrier: no member leaves before all have entered.
#ifndef KERAS_HVD_TF_OPS_COLLECTIVES_BARRIER_H_
#define KERAS_HVD_TF_OPS_COLLECTIVES_BARRIER_H_

#include "tf_ops/collectives/communicator.h"
#include "tf_ops/collectives/hosts_communicator.h"

namespace keras_hvd {

// Returns false if the job failed meanwhile.
bool Barrier(Communicator* communicator);
bool Barrier(HostsCommunicator* hosts);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COLLECTIVES_BARRIER_H_
