// The stream of the GPU that a kernel runs on.
#pragma once

#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/engine/c_api.h"

namespace keras_hvd {

// Marks a request, which already has its tensors, as on a GPU if the kernel runs on
// one. If the engine cannot use that GPU, it reports so.
void AddGpuStream(tensorflow::OpKernelContext* ctx, khvd_request* request);

}  // namespace keras_hvd
