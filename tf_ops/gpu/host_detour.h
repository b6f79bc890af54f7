// Collectives of tensors on a GPU through host memory: for what NCCL does not reduce as
// the CPU would, and for ranks that cannot use NCCL.
#ifndef KERAS_HVD_TF_OPS_GPU_HOST_DETOUR_H_
#define KERAS_HVD_TF_OPS_GPU_HOST_DETOUR_H_

#include <vector>

#include "tf_ops/gpu/gpu_batch.h"

namespace keras_hvd {

// Runs these of the batch's operations: waits for their inputs, and leaves their
// results on the collectives' stream.
Status RunThroughHost(const std::vector<Operation*>& operations, GpuBatch* batch);

// Compares the results of a batch that is on the collectives' stream.
Status CompareThroughHost(GpuBatch* batch);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_GPU_HOST_DETOUR_H_
