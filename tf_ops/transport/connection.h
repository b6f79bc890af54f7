// The bytes of a connection to another host, in the clear or over TLS.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "tf_ops/transport/reachability.h"
#include "tf_ops/transport/tls.h"

namespace keras_hvd {

// Never waits. Only one thread may use it at a time.
class Connection {
 public:
  // Takes over a connected stream socket, and the session that is complete over it;
  // null: in the clear.
  Connection(int socket, std::unique_ptr<TlsSession> tls);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int socket() const { return socket_; }

  // Each moves bytes of these pieces and returns how many; 0 if none can be moved now,
  // or none ever again. Sending begins with the same bytes next time, if it returns 0.
  // Receiving returns fewer bytes than there is room for only if no more have come.
  int64_t Send(const iovec* pieces, int count);
  int64_t Receive(const iovec* pieces, int count);
  // Sends nothing more, which the other end sees as an end.
  void EndSending();

  // How long a small message takes to the other host: half of the shortest round trip
  // of late. 0 if the kernel does not know.
  std::chrono::microseconds OneWayDelay() const;

  // Why nothing can be moved any more, as in "it was closed"; "" while it can.
  const std::string& why_closed() const { return why_closed_; }
  // Whether that is because the other host does not answer.
  bool is_unreachable() const { return MeansUnreachable(error_); }

 private:
  int64_t ReceiveInTheClear(const iovec* pieces, int count);
  int64_t MovedOverTls(int64_t outcome);
  int64_t MovedInTheClear(int64_t outcome);

  const int socket_;
  const std::unique_ptr<TlsSession> tls_;
  std::string why_closed_;
  int error_ = 0;  // the system's
};

}  // namespace keras_hvd
