// The interface for moving and reducing GPU tensors among the members of a process set.
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
  // Runs these operations of the batch, all of which it can run, after what is on the
  // collectives' stream, and leaves their results on that stream.
  virtual Status Run(const std::vector<Operation*>& operations, GpuBatch* batch) = 0;
};

}  // namespace keras_hvd
