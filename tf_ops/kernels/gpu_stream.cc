// The stream of the GPU that a kernel runs on; see gpu_stream.h.
#include "tf_ops/kernels/gpu_stream.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/device_base.h"
#include "xla/stream_executor/platform.h"
#include "xla/stream_executor/stream.h"
#include "xla/stream_executor/stream_executor.h"

namespace keras_hvd {

absl::Status AddGpuStream(tensorflow::OpKernelContext* ctx, khvd_request* request) {
  // A barrier has nothing on a GPU: it is passed when the ranks have come to it.
  if (request->count == 0) return absl::OkStatus();
  tensorflow::DeviceContext* const device = ctx->op_device_context();
  if (device == nullptr || device->stream() == nullptr) return absl::OkStatus();
  const stream_executor::Stream& stream = *device->stream();
  const std::string& platform = stream.parent()->GetPlatform()->Name();
  if (platform != "CUDA") {
    return absl::UnimplementedError(absl::StrCat(
        "'", request->name, "' is on ", ctx->device()->name(), ", a GPU of ", platform,
        ", and keras_hvd's collectives take those of CUDA: put "
        "it on the CPU, with tf.device('/CPU:0')"));
  }
  request->on_gpu = 1;
  request->stream = stream.platform_specific_handle().stream;
  return absl::OkStatus();
}

}  // namespace keras_hvd
