#include "tf_ops/nccl/allgather.h"

#include <algorithm>

namespace keras_hvd::nccl {
namespace {

bool IsEmpty(const AllgatherTensor& tensor) {
  return tensor.row_bytes == 0 || std::all_of(tensor.rows.begin(), tensor.rows.end(),
                                              [](int64_t rows) { return rows == 0; });
}

bool IsEven(const AllgatherTensor& tensor) {
  return std::adjacent_find(tensor.rows.begin(), tensor.rows.end(),
                            std::not_equal_to<>()) == tensor.rows.end();
}

Status GatherEven(const AllgatherTensor& tensor, Communicator* communicator) {
  return communicator->Enqueue("ncclAllGather", &Functions::all_gather, tensor.input,
                               tensor.output, tensor.rows.front() * tensor.row_bytes,
                               Type::kUint8);
}

// NCCL has no allgather of uneven parts, so each member broadcasts its part.
Status GatherUneven(const AllgatherTensor& tensor, Communicator* communicator) {
  char* place = static_cast<char*>(tensor.output);
  for (int member = 0; member < communicator->count(); ++member) {
    const int64_t bytes = tensor.rows[member] * tensor.row_bytes;
    if (bytes == 0) continue;
    const void* const input = member == communicator->index() ? tensor.input : place;
    KHVD_RETURN_IF_ERROR(communicator->Enqueue("ncclBroadcast", &Functions::broadcast,
                                               input, place, bytes, Type::kUint8,
                                               member));
    place += bytes;
  }
  return Status::Ok();
}

}  // namespace

Status Allgather(const AllgatherOptions& options, Communicator* communicator) {
  if (std::all_of(options.tensors.begin(), options.tensors.end(), IsEmpty)) {
    return Status::Ok();
  }
  return communicator->Group([&] {
    for (const AllgatherTensor& tensor : options.tensors) {
      if (IsEmpty(tensor)) continue;
      KHVD_RETURN_IF_ERROR(IsEven(tensor) ? GatherEven(tensor, communicator)
                                          : GatherUneven(tensor, communicator));
    }
    return Status::Ok();
  });
}

}  // namespace keras_hvd::nccl
