// The stream of the GPU that a kernel runs on; see gpu_stream.h.
#include "tf_ops/kernels/gpu_stream.h"

#include "tensorflow/core/framework/device_base.h"
#include "xla/stream_executor/stream.h"

namespace keras_hvd {

void AddGpuStream(tensorflow::OpKernelContext* ctx, khvd_request* request) {
  // A barrier has no work on a GPU: it is passed when the ranks have reached it.
  if (request->count == 0) return;
  tensorflow::DeviceContext* const device = ctx->op_device_context();
  if (device == nullptr || device->stream() == nullptr) return;
  request->on_gpu = 1;
  request->stream = device->stream()->platform_specific_handle().stream;
}

}  // namespace keras_hvd
