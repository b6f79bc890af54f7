// See gpu_backend.h.
#include "tf_ops/gpu/gpu_backend.h"

namespace keras_hvd {
namespace {

Status CopyTensor(Operation* operation, size_t tensor, GpuBatch* batch) {
  const TensorDescription& description = operation->description->tensors[tensor];
  int64_t bytes = Elements(description) * Bytes(description.dtype);
  if (HasOwnRows(operation->description->kind)) {
    const int64_t rows = operation->rows[tensor];
    KHVD_RETURN_IF_ERROR(batch->Allocate(operation, tensor, {rows}));
    bytes = rows * RowBytes(description);
  }
  const auto [input, output] = operation->buffers[tensor];
  if (bytes == 0 || input == output) return Status::Ok();
  return batch->gpu->CopyOnDevice(output, input, bytes);
}

}  // namespace

bool OneRankBackend::CanRun(const Operation& operation) const {
  const Description& description = *operation.description;
  if (!Reduces(description.kind)) return true;
  return description.reduction.prescale == 1 && description.reduction.postscale == 1;
}

Status OneRankBackend::Run(const std::vector<Operation*>& operations, GpuBatch* batch) {
  const GpuSpan span(batch->times.get(), GpuPhase::kCopyOnGpu);
  for (Operation* const operation : operations) {
    for (size_t i = 0; i < operation->buffers.size(); ++i) {
      KHVD_RETURN_IF_ERROR(CopyTensor(operation, i, batch));
    }
  }
  return Status::Ok();
}

}  // namespace keras_hvd
