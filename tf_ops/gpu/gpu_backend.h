// What moves and reduces tensors on GPUs among the members of a process set.
#ifndef KERAS_HVD_TF_OPS_GPU_GPU_BACKEND_H_
#define KERAS_HVD_TF_OPS_GPU_GPU_BACKEND_H_

#include <vector>

#include "tf_ops/gpu/gpu_batch.h"
#include "tf_ops/operation/operation.h"

namespace keras_hvd {

// All of it is for who drives the engine.
class GpuBackend {
 public:
  virtual ~GpuBackend() = default;

  // Whether it runs the operation, with a result like the CPU's.
  virtual bool CanRun(const Operation& operation) const = 0;
  // Runs these of the batch's operations, which it can run, behind what is on the
  // collectives' stream, and leaves their results there.
  virtual Status Run(const std::vector<Operation*>& operations, GpuBatch* batch) = 0;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_GPU_GPU_BACKEND_H_
