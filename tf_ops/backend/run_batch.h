// Runs the collective of a batch's kind, with the options that its requests give.
#pragma once

#include <vector>

#include "tf_ops/backend/collective_backend.h"
#include "tf_ops/collectives/communicator.h"
#include "tf_ops/collectives/hosts_communicator.h"

namespace keras_hvd {

// For a collective of `members` that has begun. Returns false if the job failed
// meanwhile.
template <typename Group>  // a Communicator, or a HostsCommunicator
bool RunBatch(const Batch& batch, const Tuning& tuning, const std::vector<int>& members,
              Group* communicator);

}  // namespace keras_hvd
