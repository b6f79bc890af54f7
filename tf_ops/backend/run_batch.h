// Runs the collective of a batch's kind, with the options that its requests give.
#pragma once

#include <vector>

#include "tf_ops/backend/collective_backend.h"
#include "tf_ops/collectives/allreduce.h"
#include "tf_ops/collectives/broadcast.h"
#include "tf_ops/collectives/reducescatter.h"

namespace keras_hvd {

// The options of collectives, from requests of them.
void AddTensors(const Operation& operation, std::vector<AllreduceTensor>* tensors);
BroadcastOptions BroadcastOf(const Operation& operation,
                             const std::vector<int>& members);
ReducescatterOptions ReducescatterOf(const Operation& operation);

// For a collective of `members` that has begun. Returns false if the job failed
// meanwhile.
template <typename Group>  // a Communicator, or a HostsCommunicator
bool RunBatch(const Batch& batch, const Tuning& tuning, const std::vector<int>& members,
              Group* communicator);

}  // namespace keras_hvd
