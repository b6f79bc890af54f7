// Hashes of the members' results, for the consistency mode, which checks that a result
// is the same on all of them.
#pragma once

#include <cstdint>
#include <vector>

#include "tf_ops/collectives/communicator.h"
#include "tf_ops/collectives/hosts_communicator.h"

namespace keras_hvd {

// Stands for the result of a member without one.
inline constexpr uint64_t kNoResult = 0;

// Never returns kNoResult. Data that differs in a single word of 8 bytes always has
// different hashes; other data almost always does.
uint64_t Hash(const void* data, int64_t bytes);

// Gives every member all members' hashes. `own` has the same length on every member,
// and `hashes[member]` has that length and order. Call it between the end of a
// collective and Communicator::End. Returns false if the job failed meanwhile.
bool AllgatherHashes(const std::vector<uint64_t>& own, Communicator* communicator,
                     std::vector<std::vector<uint64_t>>* hashes);
bool AllgatherHashes(const std::vector<uint64_t>& own, HostsCommunicator* hosts,
                     std::vector<std::vector<uint64_t>>* hashes);

}  // namespace keras_hvd
