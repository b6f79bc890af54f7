// See gpu_backend.h.
#include <numeric>
#include <utility>

#include "tf_ops/collectives/parts.h"
#include "tf_ops/gpu/gpu_backend.h"

namespace keras_hvd {
namespace {

using Space = cuda::Memory::Space;

int64_t InputBytes(const Operation& operation, size_t tensor) {
  const TensorDescription& description = operation.description->tensors[tensor];
  if (!HasOwnRows(operation.description->kind)) {
    return Elements(description) * Bytes(description.dtype);
  }
  return operation.rows[tensor] * RowBytes(description);
}

// The size of a result that is known at the start.
int64_t OutputBytes(const Operation& operation, size_t tensor, const GpuBatch& batch) {
  const TensorDescription& description = operation.description->tensors[tensor];
  if (!TraitsOf(operation.description->kind).gives_parts) {
    return InputBytes(operation, tensor);
  }
  const int64_t rows = PartSize(description.shape.front(), batch.index,
                                static_cast<int>(batch.members.size()));
  return rows * RowBytes(description);
}

// An operation's stand-in in host memory.
class StagedOperation {
 public:
  StagedOperation(Operation* operation, GpuBatch* batch)
      : operation_(operation), batch_(batch) {}

  // Makes the stand-in and enqueues copies of the inputs, which are there when the
  // stream reaches that point.
  Status Start(std::unique_ptr<Operation>* stand_in);
  // Enqueues copies of the stand-in's results to their destinations.
  Status Finish(const Operation& stand_in);

 private:
  void* Allocate(size_t tensor, const std::vector<int64_t>& rows, Operation* stand_in);

  Operation* const operation_;
  GpuBatch* const batch_;
  Status allocation_;
};

Status StagedOperation::Start(std::unique_ptr<Operation>* made) {
  auto stand_in = std::make_unique<Operation>();
  stand_in->description = operation_->description;
  stand_in->rows = operation_->rows;
  stand_in->splits = operation_->splits;
  const bool late = HasOwnRows(operation_->description->kind);
  for (size_t i = 0; i < operation_->buffers.size(); ++i) {
    const int64_t bytes = InputBytes(*operation_, i);
    char* input = nullptr;
    char* output = nullptr;
    Status status = batch_->TakeMemory(Space::kHost, bytes, &input);
    if (status.ok() && !late) {
      status = batch_->TakeMemory(Space::kHost, OutputBytes(*operation_, i, *batch_),
                                  &output);
    }
    // In a broadcast, only the root needs an input.
    const void* const from = operation_->buffers[i].input;
    if (status.ok() && bytes > 0 && from != nullptr) {
      status = batch_->gpu->CopyToHost(input, from, bytes);
    }
    if (!status.ok()) return status;
    stand_in->buffers.push_back({input, output});
  }
  stand_in->allocate = [this, at = stand_in.get()](size_t tensor,
                                                   const std::vector<int64_t>& rows) {
    return Allocate(tensor, rows, at);
  };
  *made = std::move(stand_in);
  return Status::Ok();
}

void* StagedOperation::Allocate(size_t tensor, const std::vector<int64_t>& rows,
                                Operation* stand_in) {
  if (!allocation_.ok()) return nullptr;
  allocation_ = batch_->Allocate(operation_, tensor, rows);
  const int64_t sum = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  const int64_t bytes = sum * RowBytes(stand_in->description->tensors[tensor]);
  char* memory = nullptr;
  if (allocation_.ok()) {
    allocation_ = batch_->TakeMemory(Space::kHost, bytes, &memory);
  }
  return memory;
}

Status StagedOperation::Finish(const Operation& stand_in) {
  if (!allocation_.ok()) return allocation_;
  const bool late = HasOwnRows(operation_->description->kind);
  for (size_t i = 0; i < operation_->buffers.size(); ++i) {
    const int64_t bytes =
        late ? stand_in.allocated_bytes[i] : OutputBytes(*operation_, i, *batch_);
    if (bytes == 0) continue;
    KHVD_RETURN_IF_ERROR(batch_->gpu->CopyToDevice(operation_->buffers[i].output,
                                                   stand_in.buffers[i].output, bytes));
  }
  return Status::Ok();
}

Status StartAll(const std::vector<Operation*>& operations, GpuBatch* batch,
                std::vector<StagedOperation>* staged, Batch* stand_ins) {
  const GpuSpan span(batch->times.get(), GpuPhase::kCopyToHost);
  for (Operation* operation : operations) {
    staged->emplace_back(operation, batch);
    KHVD_RETURN_IF_ERROR(staged->back().Start(&stand_ins->emplace_back()));
  }
  return Status::Ok();
}

bool RunOnHost(const Batch& stand_ins, GpuBatch* batch) {
  const GpuSpan span(batch->times.get(), GpuPhase::kHostCollective);
  return batch->host.Begin() != nullptr && batch->host.Run(stand_ins);
}

}  // namespace

bool HostStagingBackend::CanRun(const Operation&) const { return true; }

Status HostStagingBackend::Run(const std::vector<Operation*>& operations,
                               GpuBatch* batch) {
  std::vector<StagedOperation> staged;
  Batch stand_ins;
  staged.reserve(operations.size());
  KHVD_RETURN_IF_ERROR(StartAll(operations, batch, &staged, &stand_ins));
  KHVD_RETURN_IF_ERROR(batch->AwaitStream());
  if (!RunOnHost(stand_ins, batch)) return GivenUp();
  const GpuSpan span(batch->times.get(), GpuPhase::kCopyToGpu);
  for (size_t i = 0; i < staged.size(); ++i) {
    KHVD_RETURN_IF_ERROR(staged[i].Finish(*stand_ins[i]));
  }
  return Status::Ok();
}

Status CompareThroughHost(GpuBatch* batch) {
  Batch stand_ins;
  for (const auto& operation : batch->operations) {
    auto stand_in = std::make_unique<Operation>();
    stand_in->description = operation->description;
    stand_in->rows = operation->rows;
    stand_in->allocated_bytes = operation->allocated_bytes;
    stand_in->out_of_memory = operation->out_of_memory;
    const bool late = HasOwnRows(operation->description->kind);
    for (size_t i = 0; i < operation->buffers.size(); ++i) {
      const int64_t bytes =
          late ? operation->allocated_bytes[i] : InputBytes(*operation, i);
      char* output = nullptr;
      Status status = batch->TakeMemory(Space::kHost, bytes, &output);
      if (status.ok() && bytes > 0) {
        status = batch->gpu->CopyToHost(output, operation->buffers[i].output, bytes);
      }
      if (!status.ok()) return status;
      stand_in->buffers.push_back({output, output});
    }
    stand_ins.push_back(std::move(stand_in));
  }
  KHVD_RETURN_IF_ERROR(batch->AwaitStream());
  if (batch->host.Begin() == nullptr || !batch->host.Compare(stand_ins)) {
    return GivenUp();
  }
  return Status::Ok();
}

}  // namespace keras_hvd
