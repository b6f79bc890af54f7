#include "tf_ops/gpu/gpu_batch.h"

#include <numeric>

namespace keras_hvd {

Status GpuBatch::AllgatherValues(const std::vector<int64_t>& own,
                                 std::vector<std::vector<int64_t>>* all) {
  CollectiveBackend* const backend = host.Begin();
  if (backend == nullptr || !backend->AllgatherValues(own, all)) return GivenUp();
  return Status::Ok();
}

Status GpuBatch::TakeMemory(cuda::Memory::Space space, size_t bytes, char** memory) {
  cuda::Memory taken;
  KHVD_RETURN_IF_ERROR(staging_.Take(gpu, space, bytes, &taken));
  *memory = static_cast<char*>(taken.data());
  memory_.push_back(std::move(taken));
  return Status::Ok();
}

Status GpuBatch::Allocate(Operation* operation, size_t tensor,
                          const std::vector<int64_t>& rows) {
  if (AllocateResult(operation, tensor, rows) != nullptr) {
    // The memory is free once the work on the caller's stream has run.
    std::shared_ptr<const SharedEvent> free;
    const Status status = RecordOn(gpu, operation->stream_point->stream, &free);
    return status.ok() ? free->MakeWait(gpu->stream()) : status;
  }
  // The other members still send their rows.
  const int64_t sum = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  if (sum == 0) return Status::Ok();
  char* instead = nullptr;
  const int64_t bytes = sum * RowBytes(operation->description->tensors[tensor]);
  const Status status = TakeMemory(cuda::Memory::Space::kDevice, bytes, &instead);
  operation->buffers[tensor].output = instead;
  return status;
}

Status GpuBatch::AwaitStream() {
  std::shared_ptr<const SharedEvent> event;
  Status status = RecordOn(gpu, gpu->stream(), &event);
  bool passed = false;
  if (status.ok()) status = event->Query(&passed);
  for (int64_t polls = 0; status.ok() && !passed; ++polls) {
    if (!keep_waiting_(polls)) return GivenUp();
    status = event->Query(&passed);
  }
  return status;
}

}  // namespace keras_hvd
