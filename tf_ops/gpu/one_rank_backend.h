// Collectives of GPU tensors in a process set of one rank, which are copies at most.
// NCCL refuses some of them there: scaled sums, and reducescatters.
#pragma once

#include <vector>

#include "tf_ops/gpu/gpu_backend.h"

namespace keras_hvd {

class OneRankBackend final : public GpuBackend {
 public:
  bool CanRun(const Operation& operation) const override;
  Status Run(const std::vector<Operation*>& operations, GpuBatch* batch) override;
};

}  // namespace keras_hvd
