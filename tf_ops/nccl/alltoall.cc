#include "tf_ops/nccl/alltoall.h"

#include <algorithm>

namespace keras_hvd::nccl {
namespace {

bool AnyRows(const std::vector<int64_t>& rows) {
  return std::any_of(rows.begin(), rows.end(), [](int64_t count) { return count > 0; });
}

Status Send(const AlltoallOptions& options, Communicator* communicator) {
  const char* place = static_cast<const char*>(options.input);
  for (int peer = 0; peer < communicator->count(); ++peer) {
    const int64_t bytes = options.sent[peer] * options.row_bytes;
    if (bytes == 0) continue;
    const Result result = communicator->library()->send(
        place, bytes, Type::kUint8, peer, communicator->comm(), communicator->stream());
    KHVD_RETURN_IF_ERROR(communicator->Check(result, "ncclSend"));
    place += bytes;
  }
  return Status::Ok();
}

Status Receive(const AlltoallOptions& options, Communicator* communicator) {
  char* place = static_cast<char*>(options.output);
  for (int peer = 0; peer < communicator->count(); ++peer) {
    const int64_t bytes = options.received[peer] * options.row_bytes;
    if (bytes == 0) continue;
    const Result result = communicator->library()->receive(
        place, bytes, Type::kUint8, peer, communicator->comm(), communicator->stream());
    KHVD_RETURN_IF_ERROR(communicator->Check(result, "ncclRecv"));
    place += bytes;
  }
  return Status::Ok();
}

}  // namespace

Status Alltoall(const AlltoallOptions& options, Communicator* communicator) {
  const bool moves = AnyRows(options.sent) || AnyRows(options.received);
  if (options.row_bytes == 0 || !moves) return Status::Ok();
  // Only within one group may all members send before they receive, and may a member
  // send to itself.
  return communicator->Group([&] {
    Status status = Send(options, communicator);
    return status.ok() ? Receive(options, communicator) : status;
  });
}

}  // namespace keras_hvd::nccl
