// The consistency mode's check of a batch's outputs: all ranks must have the same ones.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tf_ops/operation/operation.h"

namespace keras_hvd {

// Gives every member the hashes of all members.
using HashExchange = std::function<bool(const std::vector<uint64_t>& own,
                                        std::vector<std::vector<uint64_t>>* all)>;

// Compares the members' results of operations that have just run. `*difference` names
// the first tensor that differs and each member's hash. It is the same on all members,
// or "". Returns false if the job failed meanwhile.
bool CompareOutputs(const Batch& operations, const std::vector<int>& members,
                    const HashExchange& exchange, std::string* difference);

}  // namespace keras_hvd
