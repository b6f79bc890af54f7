#include "tf_ops/transport/connection.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "tf_ops/transport/faults.h"

namespace keras_hvd {
namespace {

constexpr char kClosed[] = "it was closed";

msghdr MessageOf(const iovec* pieces, int count) {
  msghdr message = {};
  message.msg_iov = const_cast<iovec*>(pieces);
  message.msg_iovlen = count;
  return message;
}

}  // namespace

Connection::Connection(int socket, std::unique_ptr<TlsSession> tls)
    : socket_(socket), tls_(std::move(tls)) {
  fcntl(socket_, F_SETFL, fcntl(socket_, F_GETFL) | O_NONBLOCK);
  // Fails for a unix socket, which delays nothing.
  const int on = 1;
  setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

Connection::~Connection() {
  if (tls_ != nullptr) tls_->EndWriting();
  close(socket_);
}

int64_t Connection::Send(const iovec* pieces, int count) {
  if (!why_closed_.empty()) return 0;
  FaultPoint();
  if (tls_ != nullptr) return MovedOverTls(tls_->Write(pieces, count));
  const msghdr message = MessageOf(pieces, count);
  return MovedInTheClear(TEMP_FAILURE_RETRY(sendmsg(socket_, &message, MSG_NOSIGNAL)));
}

int64_t Connection::Receive(const iovec* pieces, int count) {
  if (!why_closed_.empty()) return 0;
  const int64_t moved = tls_ != nullptr ? MovedOverTls(tls_->Read(pieces, count))
                                        : ReceiveInTheClear(pieces, count);
  if (moved > 0) FaultPoint();
  return moved;
}

int64_t Connection::ReceiveInTheClear(const iovec* pieces, int count) {
  msghdr message = MessageOf(pieces, count);
  return MovedInTheClear(TEMP_FAILURE_RETRY(recvmsg(socket_, &message, 0)));
}

void Connection::EndSending() {
  FaultPoint();
  if (tls_ != nullptr) tls_->EndWriting();
  shutdown(socket_, SHUT_WR);
}

int64_t Connection::MovedOverTls(int64_t outcome) {
  if (outcome > 0) return outcome;
  if (outcome == TlsSession::kEnded) why_closed_ = kClosed;
  if (outcome == TlsSession::kRefused || outcome == TlsSession::kLost) {
    why_closed_ = tls_->why_failed();
    error_ = tls_->error();
  }
  return 0;
}

int64_t Connection::MovedInTheClear(int64_t outcome) {
  if (outcome > 0) return outcome;
  if (outcome == 0) why_closed_ = kClosed;
  if (outcome < 0 && errno != EAGAIN) {
    error_ = errno;
    why_closed_ = strerror(error_);
  }
  return 0;
}

std::chrono::microseconds Connection::OneWayDelay() const {
  tcp_info info = {};
  socklen_t length = sizeof(info);
  const bool is_tcp = getsockopt(socket_, IPPROTO_TCP, TCP_INFO, &info, &length) == 0;
  // All bits are set until there was a round trip.
  if (!is_tcp || info.tcpi_min_rtt == ~0u) return std::chrono::microseconds(0);
  return std::chrono::microseconds(info.tcpi_min_rtt / 2);
}

}  // namespace keras_hvd
