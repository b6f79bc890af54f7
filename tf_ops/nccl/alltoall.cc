#include "tf_ops/nccl/alltoall.h"

#include <algorithm>

namespace keras_hvd::nccl {
namespace {

bool AnyRows(const std::vector<int64_t>& rows) {
  return std::any_of(rows.begin(), rows.end(), [](int64_t count) { return count > 0; });
}

// Calls `move(peer, place, bytes)` for each peer with rows, which lie next to each
// other.
template <typename Move>
Status ForEachPeer(const std::vector<int64_t>& rows, int64_t row_bytes,
                   const void* data, const Move& move) {
  char* place = static_cast<char*>(const_cast<void*>(data));
  for (size_t peer = 0; peer < rows.size(); ++peer) {
    const int64_t bytes = rows[peer] * row_bytes;
    if (bytes > 0) KHVD_RETURN_IF_ERROR(move(static_cast<int>(peer), place, bytes));
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
    KHVD_RETURN_IF_ERROR(ForEachPeer(options.sent, options.row_bytes, options.input,
                                     [&](int peer, const void* place, int64_t bytes) {
                                       return communicator->Enqueue(
                                           "ncclSend", &Functions::send, place, bytes,
                                           Type::kUint8, peer);
                                     }));
    return ForEachPeer(options.received, options.row_bytes, options.output,
                       [&](int peer, void* place, int64_t bytes) {
                         return communicator->Enqueue("ncclRecv", &Functions::receive,
                                                      place, bytes, Type::kUint8, peer);
                       });
  });
}

}  // namespace keras_hvd::nccl
