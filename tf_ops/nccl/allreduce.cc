#include "tf_ops/nccl/allreduce.h"

#include "tf_ops/nccl/reduction.h"

namespace keras_hvd::nccl {

Status Allreduce(const AllreduceOptions& options, Communicator* communicator) {
  ScopedOps ops(options.reduction);
  std::vector<const AllreduceTensor*> tensors;
  tensors.reserve(options.tensors.size());
  for (const AllreduceTensor& tensor : options.tensors) {
    if (tensor.elements == 0) continue;
    KHVD_RETURN_IF_ERROR(ops.Add(tensor.dtype, communicator));
    tensors.push_back(&tensor);
  }
  if (tensors.empty()) return Status::Ok();
  return communicator->Group([&] {
    for (const AllreduceTensor* tensor : tensors) {
      KHVD_RETURN_IF_ERROR(communicator->Enqueue(
          "ncclAllReduce", &Functions::all_reduce, tensor->input, tensor->output,
          tensor->elements, TypeOf(tensor->dtype), ops.Of(tensor->dtype)));
    }
    return Status::Ok();
  });
}

}  // namespace keras_hvd::nccl
