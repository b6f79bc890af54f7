#include "tf_ops/transport/socket_data_link.h"

#include <algorithm>
#include <cstddef>

namespace keras_hvd {

// How many pieces, and how many bytes, one call moves. While a long call is under way,
// the kernel puts aside the bytes that come for the socket, and handles them
// afterwards.
constexpr int kMostPieces = 64;
constexpr size_t kMostBytes = 128 << 10;
// How many unwanted bytes one call drops.
constexpr size_t kDropBytes = 16 << 10;
// How many bytes a connection carries before it is the next one's turn.
constexpr int64_t kStripeBytes = 64 << 10;

SocketDataLink::SocketDataLink(int socket, std::unique_ptr<TlsSession> tls,
                               std::chrono::seconds limit)
    : DataLink(limit) {
  Add(socket, std::move(tls));
}

void SocketDataLink::Add(int socket, std::unique_ptr<TlsSession> tls) {
  carriers_.push_back(std::make_unique<Carrier>(socket, std::move(tls), limit()));
}

int64_t SocketDataLink::Send(const void* data, int64_t bytes) {
  return Post(&Carrier::sending, &sent_, static_cast<char*>(const_cast<void*>(data)),
              bytes);
}

int64_t SocketDataLink::Receive(void* data, int64_t bytes) {
  return Post(&Carrier::receiving, &received_, static_cast<char*>(data), bytes);
}

bool SocketDataLink::Move() {
  const bool sent = MoveAll(&Carrier::sending, &Connection::Send, &sent_);
  const bool received = MoveAll(&Carrier::receiving, &Connection::Receive, &received_);
  return sent || received;
}

void SocketDataLink::CheckPeer(Clock::time_point now) {
  for (const auto& carrier : carriers_) {
    if (closed()) return;
    if (!carrier->sending.waits() && !carrier->receiving.waits()) continue;
    // A rank that only receives has nothing on its way.
    carrier->reachability.KeepAsking();
    if (!carrier->reachability.IsLost(now)) continue;
    is_unreachable_ = true;
    why_closed_ = "the other host does not answer";
  }
}

void SocketDataLink::Abandon() {
  for (const auto& carrier : carriers_) {
    carrier->sending.pieces.clear();
    carrier->receiving.pieces.clear();
  }
  if (!closed()) why_closed_ = "it was abandoned";
}

int64_t SocketDataLink::Post(Part part, Progressed* all, char* data, int64_t bytes) {
  const int64_t carriers = static_cast<int64_t>(carriers_.size());
  while (bytes > 0) {
    const int64_t stripe = all->posted / kStripeBytes;
    const int64_t left = (stripe + 1) * kStripeBytes - all->posted;
    const int64_t now = carriers == 1 ? bytes : std::min(bytes, left);
    (carriers_[stripe % carriers].get()->*part).Post(data, now);
    all->posted += now;
    bytes -= now;
    if (data != nullptr) data += now;
  }
  return all->posted;
}

bool SocketDataLink::MoveAll(Part part, Call call, Progressed* all) {
  if (!all->waits()) return false;
  const int64_t carriers = static_cast<int64_t>(carriers_.size());
  bool moved = false;
  // Up to the first byte that its connection has not moved yet.
  int64_t end = all->posted;
  for (int64_t number = 0; number < carriers; ++number) {
    Carrier* const carrier = carriers_[number].get();
    Transfers* const transfers = &(carrier->*part);
    moved = MoveOn(carrier, transfers, call) || moved;
    if (!transfers->waits()) continue;
    const int64_t stripe = transfers->moved / kStripeBytes * carriers + number;
    end = std::min(end, stripe * kStripeBytes + transfers->moved % kStripeBytes);
  }
  all->moved = end;
  return moved;
}

bool SocketDataLink::MoveOn(Carrier* carrier, Transfers* transfers, Call call) {
  bool moved = false;
  char dropped[kDropBytes];
  while (transfers->waits() && !closed()) {
    iovec pieces[kMostPieces];
    int count = 0;
    size_t left = kMostBytes;
    for (const iovec& piece : transfers->pieces) {
      if (count == kMostPieces || left == 0) break;
      const bool drops = piece.iov_base == nullptr;
      pieces[count] = drops
                          ? iovec{dropped, std::min({piece.iov_len, kDropBytes, left})}
                          : iovec{piece.iov_base, std::min(piece.iov_len, left)};
      left -= pieces[count].iov_len;
      ++count;
      if (drops) break;
    }
    const int64_t bytes = (carrier->connection.*call)(pieces, count);
    why_closed_ = carrier->connection.why_closed();
    is_unreachable_ = carrier->connection.is_unreachable();
    if (bytes == 0) break;
    transfers->Advance(bytes);
    moved = true;
  }
  return moved;
}

void SocketDataLink::Transfers::Post(char* data, int64_t bytes) {
  posted += bytes;
  const bool continues =
      data != nullptr && !pieces.empty() && pieces.back().iov_base != nullptr &&
      static_cast<char*>(pieces.back().iov_base) + pieces.back().iov_len == data;
  if (continues) {
    pieces.back().iov_len += bytes;
  } else {
    pieces.push_back({data, static_cast<size_t>(bytes)});
  }
}

void SocketDataLink::Transfers::Advance(int64_t bytes) {
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
