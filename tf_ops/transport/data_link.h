// What carries tensors between two ranks on different hosts: a connection, or several
// where the network gives one of them only a part of what it can do.
//
// Bytes go straight from and to the callers' memory, in the order of their posting, and
// carry no headers: both ends know what comes next. Only what has been posted is read,
// so a sender that is ahead is held up by the network. Several connections take turns,
// a stripe of bytes each.
#ifndef KERAS_HVD_TF_OPS_TRANSPORT_DATA_LINK_H_
#define KERAS_HVD_TF_OPS_TRANSPORT_DATA_LINK_H_

#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tf_ops/transport/connection.h"
#include "tf_ops/transport/reachability.h"

namespace keras_hvd {

// Only one thread may use it at a time.
class DataLink {
 public:
  // Takes over what a Connection does. `limit`: after how long without an answer the
  // other host counts as gone.
  explicit DataLink(int socket, std::unique_ptr<TlsSession> tls = nullptr,
                    std::chrono::seconds limit = kHostTimeout);
  DataLink(const DataLink&) = delete;
  DataLink& operator=(const DataLink&) = delete;

  // Another connection, as the constructor's. Both ends add theirs in the same order,
  // before the first transfer.
  void Add(int socket, std::unique_ptr<TlsSession> tls = nullptr);

  // Each posts a transfer; the memory must stay until the transfer is complete. Each
  // returns what `sent` or `received` is from then on.
  int64_t Send(const void* data, int64_t bytes);
  // What comes for null is dropped.
  int64_t Receive(void* data, int64_t bytes);

  // Moves what can be moved without waiting. Returns whether anything was.
  bool Progress();

  // How many bytes have been sent and received, of all that were ever posted.
  int64_t sent() const { return sent_.moved; }
  int64_t received() const { return received_.moved; }
  // Whether anything posted is not yet complete.
  bool sends() const { return sent_.waits(); }
  bool receives() const { return received_.waits(); }

  // Why posted transfers cannot complete, as in "Connection reset by peer"; "" while
  // they can. An end that nobody waits for is not noticed.
  const std::string& why_closed() const { return why_closed_; }
  bool closed() const { return !why_closed_.empty(); }
  // Whether that is because the other host does not answer.
  bool is_unreachable() const { return is_unreachable_; }
  std::chrono::seconds limit() const { return limit_; }
  // Looks whether the other host still answers. Call it from time to time while waiting
  // for a transfer.
  void CheckPeer(Clock::time_point now);
  // Forgets what is posted and moves nothing more: its memory may go.
  void Abandon();

 private:
  // What was posted, and how much of it has been moved.
  struct Progressed {
    int64_t posted = 0;
    int64_t moved = 0;

    bool waits() const { return moved < posted; }
  };
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

  int64_t Post(Part part, Progressed* all, char* data, int64_t bytes);
  bool MoveAll(Part part, Call call, Progressed* all);
  bool Move(Carrier* carrier, Transfers* transfers, Call call);

  const std::chrono::seconds limit_;
  std::vector<std::unique_ptr<Carrier>> carriers_;
  Progressed sent_, received_;
  std::string why_closed_;
  bool is_unreachable_ = false;
};

// By rank; null for those that need none.
using DataLinks = std::vector<std::shared_ptr<DataLink>>;

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_TRANSPORT_DATA_LINK_H_
