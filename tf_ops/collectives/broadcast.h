// Broadcast: every member gets the root's tensor.
#pragma once

#include "tf_ops/collectives/communicator.h"
#include "tf_ops/collectives/hosts_communicator.h"

namespace keras_hvd {

struct BroadcastOptions {
  int root = 0;  // the root's index among the members
  int64_t bytes = 0;
  const void* input = nullptr;  // read on the root only
  void* output = nullptr;       // may be `input`
};

// Returns false if the job failed meanwhile; the output is then undefined.
bool Broadcast(const BroadcastOptions& options, Communicator* communicator);
bool Broadcast(const BroadcastOptions& options, HostsCommunicator* hosts);

}  // namespace keras_hvd
