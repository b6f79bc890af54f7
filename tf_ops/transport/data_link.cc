// See data_link.h.
#include "tf_ops/transport/data_link.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>

namespace keras_hvd {
namespace {

// How many pieces one call moves.
constexpr int kMostPieces = 64;
// How many unwanted bytes one call drops.
constexpr size_t kDropBytes = 16 << 10;

int64_t SendPieces(int socket, iovec* pieces, int count) {
  msghdr message = {};
  message.msg_iov = pieces;
  message.msg_iovlen = count;
  return sendmsg(socket, &message, MSG_NOSIGNAL);
}

int64_t ReceivePieces(int socket, iovec* pieces, int count) {
  msghdr message = {};
  message.msg_iov = pieces;
  message.msg_iovlen = count;
  return recvmsg(socket, &message, 0);
}

}  // namespace

DataLink::DataLink(int socket, std::chrono::seconds limit)
    : socket_(socket), reachability_(socket, limit) {
  fcntl(socket_, F_SETFL, fcntl(socket_, F_GETFL) | O_NONBLOCK);
  // Fails for a unix socket, which delays nothing.
  const int on = 1;
  setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

DataLink::~DataLink() { close(socket_); }

int64_t DataLink::Send(const void* data, int64_t bytes) {
  return sending_.Post(static_cast<char*>(const_cast<void*>(data)), bytes);
}

int64_t DataLink::Receive(void* data, int64_t bytes) {
  return receiving_.Post(static_cast<char*>(data), bytes);
}

bool DataLink::Progress() {
  const bool sent = Move(&sending_, SendPieces);
  const bool received = Move(&receiving_, ReceivePieces);
  return sent || received;
}

void DataLink::CheckPeer(Clock::time_point now) {
  if (closed() || (!sends() && !receives())) return;
  // Who only receives has nothing on its way.
  reachability_.KeepAsking();
  if (!reachability_.IsLost(now)) return;
  is_unreachable_ = true;
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
    const int64_t bytes = call(socket_, pieces, count);
    if (bytes > 0) {
      transfers->Advance(bytes);
      moved = true;
    } else if (bytes == 0) {
      why_closed_ = "the other end has closed it";
    } else if (errno == EAGAIN) {
      break;
    } else if (errno != EINTR) {
      is_unreachable_ = MeansUnreachable(errno);
      why_closed_ = strerror(errno);
    }
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
