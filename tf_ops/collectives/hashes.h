// Hashes of the members' results, for the consistency mode, which checks that a result
// is the same on all of them.
#pragma once

#include <cstdint>
#include <vector>

#include "tf_ops/collectives/allgather_values.h"

namespace keras_hvd {

// Stands for the result of a member without one.
inline constexpr uint64_t kNoResult = 0;

// Never returns kNoResult. Data that differs in a single word of 8 bytes always has
// different hashes. Other data almost always does.
uint64_t Hash(const void* data, int64_t bytes);

// Gives every member all members' hashes. `own` has the same length on every member,
// and `hashes[member]` has that length and order. Call it between the end of a
// collective and Communicator::End. Returns false if the job failed meanwhile.
template <typename Group>  // a Communicator, or a HostsCommunicator
bool AllgatherHashes(const std::vector<uint64_t>& own, Group* communicator,
                     std::vector<std::vector<uint64_t>>* hashes) {
  return communicator->Regroup() && communicator->NextRound() &&
         AllgatherValues(own, communicator, hashes);
}

}  // namespace keras_hvd
