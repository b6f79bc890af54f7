#include "tf_ops/gpu/nccl_backend.h"

#include <algorithm>
#include <utility>

#include "tf_ops/backend/run_batch.h"
#include "tf_ops/nccl/allgather.h"
#include "tf_ops/nccl/allreduce.h"
#include "tf_ops/nccl/alltoall.h"
#include "tf_ops/nccl/broadcast.h"
#include "tf_ops/nccl/reducescatter.h"

namespace keras_hvd {
namespace {

using Operations = std::vector<Operation*>;

Status Allreduce(const Operations& operations, GpuBatch* batch,
                 nccl::Communicator* communicator) {
  AllreduceOptions allreduce = {operations.front()->description->reduction, {}};
  for (const Operation* operation : operations) {
    AddTensors(*operation, &allreduce.tensors);
  }
  const GpuSpan span(batch->times.get(), GpuPhase::kNccl);
  return nccl::Allreduce(allreduce, communicator);
}

Status Allgather(const Operations& operations, GpuBatch* batch,
                 nccl::Communicator* communicator) {
  Operation* const operation = operations.front();
  std::vector<std::vector<int64_t>> rows;
  Status status = batch->AllgatherValues(operation->rows, &rows);
  nccl::AllgatherOptions allgather;
  for (size_t i = 0; status.ok() && i < operation->buffers.size(); ++i) {
    nccl::AllgatherTensor& tensor = allgather.tensors.emplace_back();
    for (const std::vector<int64_t>& of : rows) tensor.rows.push_back(of[i]);
    status = batch->Allocate(operation, i, tensor.rows);
    tensor.input = operation->buffers[i].input;
    tensor.output = operation->buffers[i].output;
    tensor.row_bytes = RowBytes(operation->description->tensors[i]);
  }
  if (!status.ok()) return status;
  const GpuSpan span(batch->times.get(), GpuPhase::kNccl);
  return nccl::Allgather(allgather, communicator);
}

Status Alltoall(const Operations& operations, GpuBatch* batch,
                nccl::Communicator* communicator) {
  Operation* const operation = operations.front();
  std::vector<std::vector<int64_t>> splits;
  KHVD_RETURN_IF_ERROR(batch->AllgatherValues(operation->splits, &splits));
  nccl::AlltoallOptions alltoall;
  alltoall.sent = operation->splits;
  for (const std::vector<int64_t>& of : splits) {
    alltoall.received.push_back(of[batch->index]);
  }
  KHVD_RETURN_IF_ERROR(batch->Allocate(operation, 0, alltoall.received));
  alltoall.input = operation->buffers.front().input;
  alltoall.output = operation->buffers.front().output;
  alltoall.row_bytes = RowBytes(operation->description->tensors.front());
  const GpuSpan span(batch->times.get(), GpuPhase::kNccl);
  return nccl::Alltoall(alltoall, communicator);
}

Status Broadcast(const Operations& operations, GpuBatch* batch,
                 nccl::Communicator* communicator) {
  const BroadcastOptions broadcast = BroadcastOf(*operations.front(), batch->members);
  const GpuSpan span(batch->times.get(), GpuPhase::kNccl);
  return nccl::Broadcast(broadcast, communicator);
}

Status Reducescatter(const Operations& operations, GpuBatch* batch,
                     nccl::Communicator* communicator) {
  const ReducescatterOptions reducescatter = ReducescatterOf(*operations.front());
  const GpuSpan span(batch->times.get(), GpuPhase::kNccl);
  return nccl::Reducescatter(reducescatter, communicator);
}

// Null: tensors of this kind go through host memory.
auto FunctionOf(Kind kind) -> decltype(&Allreduce) {
  switch (kind) {
    case Kind::kAllreduce: return Allreduce;
    case Kind::kAllgather: return Allgather;
    case Kind::kAlltoall: return Alltoall;
    case Kind::kBroadcast: return Broadcast;
    case Kind::kReducescatter: return Reducescatter;
    default: return nullptr;
  }
}

}  // namespace

NcclBackend::NcclBackend(std::unique_ptr<nccl::Communicator> communicator, int members,
                         const nccl::Capabilities& capabilities)
    : communicator_(std::move(communicator)),
      members_(members),
      capabilities_(capabilities) {}

bool NcclBackend::CanRun(const Operation& operation) const {
  const Description& description = *operation.description;
  if (FunctionOf(description.kind) == nullptr) return false;
  if (!Reduces(description.kind)) return true;
  return std::all_of(description.tensors.begin(), description.tensors.end(),
                     [&](const auto& tensor) {
                       // An empty tensor has nothing to reduce, whatever its type is.
                       return Elements(tensor) == 0 ||
                              nccl::CanReduce(description.reduction, tensor.dtype,
                                              members_, capabilities_);
                     });
}

Status NcclBackend::Run(const std::vector<Operation*>& operations, GpuBatch* batch) {
  const Kind kind = operations.front()->description->kind;
  communicator_->set_stream(batch->stream);
  return FunctionOf(kind)(operations, batch, communicator_.get());
}

}  // namespace keras_hvd
