// Hashes of what members of a collective have got, for the consistency mode: a result
// has to be the same on all of them.
#ifndef KERAS_HVD_TF_OPS_COLLECTIVES_HASHES_H_
#define KERAS_HVD_TF_OPS_COLLECTIVES_HASHES_H_

#include <cstdint>
#include <vector>

#include "tf_ops/collectives/communicator.h"

namespace keras_hvd {

// Stands for the result of a member that has none.
inline constexpr uint64_t kNoResult = 0;

// Never kNoResult. Data that differs in one word of 8 bytes never has the same hash,
// other data hardly ever.
uint64_t Hash(const void* data, int64_t bytes);

// Gives every member all members' hashes, `hashes[member]` as long and in the order of
// `own`, which is as long on every member. Goes between the end of a collective and
// Communicator::End. Returns false if the job failed meanwhile.
bool AllgatherHashes(const std::vector<uint64_t>& own, Communicator* communicator,
                     std::vector<std::vector<uint64_t>>* hashes);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COLLECTIVES_HASHES_H_
