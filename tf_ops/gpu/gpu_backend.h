// The ways to move and reduce GPU tensors among the members of a process set, apart
// from NCCL: see nccl_backend.h.
#pragma once

#include <vector>

#include "tf_ops/gpu/gpu_batch.h"
#include "tf_ops/operation/operation.h"

namespace keras_hvd {

// Only the thread that drives the engine calls it.
class GpuBackend {
 public:
  virtual ~GpuBackend() = default;

  // Whether it can run the operation with a result like the CPU's.
  virtual bool CanRun(const Operation& operation) const = 0;
  // Runs these operations of the batch, all of which it can run, after the work on the
  // collectives' stream, and leaves their results on that stream.
  virtual Status Run(const std::vector<Operation*>& operations, GpuBatch* batch) = 0;
};

// Collectives in a process set of one rank, which are copies at most. NCCL refuses some
// of them there: scaled sums, and reducescatters.
class OneRankBackend final : public GpuBackend {
 public:
  bool CanRun(const Operation& operation) const override;
  Status Run(const std::vector<Operation*>& operations, GpuBatch* batch) override;
};

// Collectives through host memory: for reductions that NCCL does not do as the CPU
// would, and for ranks that cannot use NCCL.
class HostStagingBackend final : public GpuBackend {
 public:
  bool CanRun(const Operation& operation) const override;
  // Waits for the inputs.
  Status Run(const std::vector<Operation*>& operations, GpuBatch* batch) override;
};

// Compares the results of a batch on the collectives' stream.
Status CompareThroughHost(GpuBatch* batch);

}  // namespace keras_hvd
