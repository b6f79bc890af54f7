#include "tf_ops/nccl/broadcast.h"

namespace keras_hvd::nccl {

Status Broadcast(const BroadcastOptions& options, Communicator* communicator) {
  if (options.bytes == 0) return Status::Ok();
  const bool is_root = options.root == communicator->index();
  return communicator->Group([&] {
    return communicator->Enqueue("ncclBroadcast", &Functions::broadcast,
                                 is_root ? options.input : options.output,
                                 options.output, options.bytes, Type::kUint8,
                                 options.root);
  });
}

}  // namespace keras_hvd::nccl
