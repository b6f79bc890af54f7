// Collectives of GPU tensors through host memory: for reductions that NCCL does not do
// as the CPU would, and for ranks that cannot use NCCL.
#pragma once

#include <vector>

#include "tf_ops/gpu/gpu_backend.h"

namespace keras_hvd {

class HostStagingBackend final : public GpuBackend {
 public:
  bool CanRun(const Operation& operation) const override;
  // Waits for the inputs.
  Status Run(const std::vector<Operation*>& operations, GpuBatch* batch) override;
};

// Compares the results of a batch on the collectives' stream.
Status CompareThroughHost(GpuBatch* batch);

}  // namespace keras_hvd
