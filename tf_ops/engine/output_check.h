// The consistency mode's look at the outputs of a batch: all ranks must have got the
// same.
#ifndef KERAS_HVD_TF_OPS_ENGINE_OUTPUT_CHECK_H_
#define KERAS_HVD_TF_OPS_ENGINE_OUTPUT_CHECK_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tf_ops/operation/operation.h"

namespace keras_hvd {

// Gives every member all members' hashes.
using HashExchange = std::function<bool(const std::vector<uint64_t>& own,
                                        std::vector<std::vector<uint64_t>>* all)>;

// Compares what the members have got of operations that have just run. `*difference`
// says which tensor is the first that differs and who has got what, the same on all
// members, or is "". Returns false if the job failed meanwhile.
bool CompareOutputs(const std::vector<std::unique_ptr<Operation>>& operations,
                    const std::vector<int>& members, const HashExchange& exchange,
                    std::string* difference);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_ENGINE_OUTPUT_CHECK_H_
