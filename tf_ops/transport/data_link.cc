// See data_link.h.
#include "tf_ops/transport/data_link.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace keras_hvd {
namespace {

// How many pieces one call moves.
constexpr int kMostPieces = 64;
// How many unwanted bytes one call drops.
constexpr size_t kDropBytes = 16 << 10;

}  // namespace

DataLink::DataLink(int socket, std::unique_ptr<TlsSession> tls,
                   std::chrono::seconds limit)
    : connection_(socket, std::move(tls)), reachability_(socket, limit) {}

int64_t DataLink::Send(const void* data, int64_t bytes) {
  return sending_.Post(static_cast<char*>(const_cast<void*>(data)), bytes);
}

int64_t DataLink::Receive(void* data, int64_t bytes) {
  return receiving_.Post(static_cast<char*>(data), bytes);
}

bool DataLink::Progress() {
  const bool sent = Move(&sending_, &Connection::Send);
  const bool received = Move(&receiving_, &Connection::Receive);
  return sent || received;
}

void DataLink::CheckPeer(Clock::time_point now) {
  if (closed() || (!sends() && !receives())) return;
  // Who only receives has nothing on its way.
  reachability_.KeepAsking();
  if (!reachability_.IsLost(now)) return;
  is_silent_ = true;
  why_closed_ = "the other host does not answer";
}

void DataLink::Abandon() {
  sending_.pieces.clear();
  receiving_.pieces.clear();
  if (!closed()) why_closed_ = "it was abandoned";
}

bool DataLink::Move(Transfers* transfers, Call call) {
  bool moved = false;
  char dropped[kDropBytes];
  while (transfers->waits() && !closed()) {
    iovec pieces[kMostPieces];
    int count = 0;
    for (const iovec& piece : transfers->pieces) {
      if (count == kMostPieces) break;
      pieces[count] = piece;
      const bool drops = piece.iov_base == nullptr;
      if (drops) pieces[count] = {dropped, std::min(piece.iov_len, kDropBytes)};
      ++count;
      if (drops) break;
    }
    const int64_t bytes = (connection_.*call)(pieces, count);
    why_closed_ = connection_.why_closed();
    if (bytes == 0) break;
    transfers->Advance(bytes);
    moved = true;
  }
  return moved;
}

int64_t DataLink::Transfers::Post(char* data, int64_t bytes) {
  posted += bytes;
  if (bytes == 0) return posted;
  const bool continues =
      data != nullptr && !pieces.empty() && pieces.back().iov_base != nullptr &&
      static_cast<char*>(pieces.back().iov_base) + pieces.back().iov_len == data;
  if (continues) {
    pieces.back().iov_len += bytes;
  } else {
    pieces.push_back({data, static_cast<size_t>(bytes)});
  }
  return posted;
}

void DataLink::Transfers::Advance(int64_t bytes) {
  moved += bytes;
  while (bytes > 0) {
    iovec& piece = pieces.front();
    const int64_t part = std::min<int64_t>(bytes, piece.iov_len);
    piece.iov_len -= part;
    if (piece.iov_base != nullptr) {
      piece.iov_base = static_cast<char*>(piece.iov_base) + part;
    }
    if (piece.iov_len == 0) pieces.pop_front();
    bytes -= part;
  }
}

}  // namespace keras_hvd
