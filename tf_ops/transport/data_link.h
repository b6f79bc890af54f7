// Carries tensors between two ranks on different hosts.
//
// Bytes come out of the callers' memory and get into it in the order of their posting,
// and carry no headers: both ends know what comes next. Only posted bytes are received,
// so a sender that is ahead is held up.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tf_ops/transport/reachability.h"

namespace keras_hvd {

// The bytes of tensors that this rank has sent to other hosts, by their carrier.
struct CarriedBytes {
  std::atomic<int64_t> tcp{0}, mpi{0};
};

// Only one thread may use it at a time.
class DataLink {
 public:
  virtual ~DataLink() = default;
  DataLink(const DataLink&) = delete;
  DataLink& operator=(const DataLink&) = delete;

  // Each says that the next `bytes` bytes are one message, which the other end may post
  // in pieces of other sizes. Without this, each posted transfer is a message.
  virtual void BeginSend(int64_t bytes) = 0;
  virtual void BeginReceive(int64_t bytes) = 0;
  // Each posts a transfer. The memory must stay until the transfer is complete. Each
  // returns the value that `sent` or `received` then has.
  virtual int64_t Send(const void* data, int64_t bytes) = 0;
  // Bytes that come for null are dropped.
  virtual int64_t Receive(void* data, int64_t bytes) = 0;

  // Moves the bytes that can be moved without waiting. Returns whether any were.
  bool Progress() {
    const int64_t sent_before = sent();
    const bool moved = Move();
    if (carried_ != nullptr) carried_->fetch_add(sent() - sent_before);
    return moved;
  }

  // How many bytes have been sent and received, of all that were ever posted.
  int64_t sent() const { return sent_.moved; }
  int64_t received() const { return received_.moved; }
  // The same once all posted transfers are complete.
  int64_t to_send() const { return sent_.posted; }
  int64_t to_receive() const { return received_.posted; }
  // Whether anything posted is not yet complete.
  bool sends() const { return sent_.waits(); }
  bool receives() const { return received_.waits(); }
  // Whether bytes that come wake a sleeping thread. Without it, Progress must be called
  // again and again until nothing posted waits.
  virtual bool wakes() const = 0;

  // Why posted transfers cannot complete, as in "Connection reset by peer"; "" while
  // they can. An end that nobody waits for is not noticed.
  const std::string& why_closed() const { return why_closed_; }
  bool closed() const { return !why_closed_.empty(); }
  // Whether that is because the other host does not answer.
  bool is_unreachable() const { return is_unreachable_; }
  std::chrono::seconds limit() const { return limit_; }
  // Looks whether the other host still answers. Call it from time to time while waiting
  // for a transfer.
  virtual void CheckPeer(Clock::time_point now) = 0;
  // Forgets the posted transfers and moves nothing more: their memory may go.
  virtual void Abandon() = 0;

  // The counter for bytes sent from now on.
  void set_carried(std::shared_ptr<std::atomic<int64_t>> carried) {
    carried_ = std::move(carried);
  }

 protected:
  // The bytes posted, and how many of them have been moved.
  struct Progressed {
    int64_t posted = 0;
    int64_t moved = 0;

    bool waits() const { return moved < posted; }
  };

  // `limit`: the other host counts as gone after this long without an answer.
  explicit DataLink(std::chrono::seconds limit) : limit_(limit) {}
  virtual bool Move() = 0;

  Progressed sent_, received_;
  std::string why_closed_;
  bool is_unreachable_ = false;

 private:
  const std::chrono::seconds limit_;
  std::shared_ptr<std::atomic<int64_t>> carried_;
};

// By rank; null for those that need none.
using DataLinks = std::vector<std::shared_ptr<DataLink>>;

}  // namespace keras_hvd
