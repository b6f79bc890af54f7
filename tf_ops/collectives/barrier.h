// Barrier: no member leaves before all have entered.
#pragma once

#include "tf_ops/collectives/communicator.h"
#include "tf_ops/collectives/hosts_communicator.h"

namespace keras_hvd {

// Returns false if the job failed meanwhile.
bool Barrier(Communicator* communicator);
bool Barrier(HostsCommunicator* hosts);

}  // namespace keras_hvd
