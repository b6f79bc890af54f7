// A data link over a connection, or several where the network gives one of them only a
// part of its bandwidth.
//
// Bytes go straight from and to the callers' memory. Only posted bytes are read, so a
// sender that is ahead is held up by the network. Several connections take turns, a
// stripe of bytes each.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "tf_ops/transport/connection.h"
#include "tf_ops/transport/data_link.h"
#include "tf_ops/transport/reachability.h"

namespace keras_hvd {

class SocketDataLink final : public DataLink {
 public:
  // Takes over the socket and the session as Connection does. `limit`: as DataLink's.
  explicit SocketDataLink(int socket, std::unique_ptr<TlsSession> tls = nullptr,
                          std::chrono::seconds limit = kHostTimeout);

  // Another connection, as the constructor's. Both ends add theirs in the same order,
  // before the first transfer.
  void Add(int socket, std::unique_ptr<TlsSession> tls = nullptr);

  // A stream has no messages.
  void BeginSend(int64_t) override {}
  void BeginReceive(int64_t) override {}
  int64_t Send(const void* data, int64_t bytes) override;
  int64_t Receive(void* data, int64_t bytes) override;
  bool wakes() const override { return true; }
  void CheckPeer(Clock::time_point now) override;
  void Abandon() override;

 private:
  // The part of one connection.
  struct Transfers : Progressed {
    std::deque<iovec> pieces;

    void Post(char* data, int64_t bytes);
    void Advance(int64_t bytes);
  };
  struct Carrier {
    Carrier(int socket, std::unique_ptr<TlsSession> tls, std::chrono::seconds limit)
        : connection(socket, std::move(tls)), reachability(socket, limit) {}

    Connection connection;
    Reachability reachability;
    Transfers sending, receiving;
  };
  using Part = Transfers Carrier::*;
  using Call = int64_t (Connection::*)(const iovec* pieces, int count);

  bool Move() override;
  int64_t Post(Part part, Progressed* all, char* data, int64_t bytes);
  bool MoveAll(Part part, Call call, Progressed* all);
  bool MoveOn(Carrier* carrier, Transfers* transfers, Call call);

  std::vector<std::unique_ptr<Carrier>> carriers_;
};

}  // namespace keras_hvd
