// Hands the tensors of a batch on GPUs to NCCL's collective of their kind.
#ifndef KERAS_HVD_TF_OPS_GPU_GPU_COLLECTIVES_H_
#define KERAS_HVD_TF_OPS_GPU_GPU_COLLECTIVES_H_

#include <vector>

#include "tf_ops/gpu/gpu_batch.h"
#include "tf_ops/nccl/communicator.h"
#include "tf_ops/nccl/reduction.h"

namespace keras_hvd {

// Whether NCCL runs the operation with a result like the CPU's.
bool CanRunByNccl(const Operation& operation, int members,
                  const nccl::Equipment& equipment);

// Enqueues these of the batch's operations, all of which NCCL can run.
Status RunByNccl(const std::vector<Operation*>& operations, GpuBatch* batch,
                 nccl::Communicator* communicator);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_GPU_GPU_COLLECTIVES_H_
