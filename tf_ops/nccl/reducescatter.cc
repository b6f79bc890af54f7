#include "tf_ops/nccl/reducescatter.h"

#include "tf_ops/collectives/parts.h"
#include "tf_ops/nccl/reduction.h"

namespace keras_hvd::nccl {
namespace {

Status ReduceEven(const ReducescatterTensor& tensor, Op op,
                  Communicator* communicator) {
  return communicator->Enqueue(
      "ncclReduceScatter", &Functions::reduce_scatter, tensor.input, tensor.output,
      tensor.rows / communicator->count() * tensor.row_elements, TypeOf(tensor.dtype),
      op);
}

// NCCL has no reducescatter of uneven parts, so each part is reduced to its member.
Status ReduceUneven(const ReducescatterTensor& tensor, Op op,
                    Communicator* communicator) {
  const int members = communicator->count();
  const int64_t row_bytes = tensor.row_elements * Bytes(tensor.dtype);
  for (int member = 0; member < members; ++member) {
    const int64_t start = PartStart(tensor.rows, member, members);
    const int64_t rows = PartStart(tensor.rows, member + 1, members) - start;
    if (rows == 0) continue;
    KHVD_RETURN_IF_ERROR(communicator->Enqueue(
        "ncclReduce", &Functions::reduce,
        static_cast<const char*>(tensor.input) + start * row_bytes, tensor.output,
        rows * tensor.row_elements, TypeOf(tensor.dtype), op, member));
  }
  return Status::Ok();
}

}  // namespace

Status Reducescatter(const ReducescatterOptions& options, Communicator* communicator) {
  ScopedOps ops(options.reduction);
  std::vector<const ReducescatterTensor*> tensors;
  for (const ReducescatterTensor& tensor : options.tensors) {
    if (tensor.rows * tensor.row_elements == 0) continue;
    KHVD_RETURN_IF_ERROR(ops.Add(tensor.dtype, communicator));
    tensors.push_back(&tensor);
  }
  if (tensors.empty()) return Status::Ok();
  return communicator->Group([&] {
    for (const ReducescatterTensor* tensor : tensors) {
      const Op op = ops.Of(tensor->dtype);
      const bool even = tensor->rows % communicator->count() == 0;
      KHVD_RETURN_IF_ERROR(even ? ReduceEven(*tensor, op, communicator)
                                : ReduceUneven(*tensor, op, communicator));
    }
    return Status::Ok();
  });
}

}  // namespace keras_hvd::nccl
