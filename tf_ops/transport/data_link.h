// What carries tensors between two ranks on different hosts.
//
// Bytes come out of the callers' memory and get into it in the order of their posting,
// and carry no headers: both ends know what comes next. Only what has been posted is
// received, so a sender that is ahead is held up.
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

// How many bytes of tensors this rank has sent to other hosts, by what carried them.
struct CarriedBytes {
  std::atomic<int64_t> tcp{0}, mpi{0};
};

// Only one thread may use it at a time.
class DataLink {
 public:
  virtual ~DataLink() = default;
  DataLink(const DataLink&) = delete;
  DataLink& operator=(const DataLink&) = delete;

  // Each says that the next so many bytes are one message, which the other end may post
  // in pieces of other sizes. Without this, what is posted at once is a message.
  virtual void BeginSend(int64_t bytes) = 0;
  virtual void BeginReceive(int64_t bytes) = 0;
  // Each posts a transfer; the memory must stay until the transfer is complete. Each
  // returns what `sent` or `received` is from then on.
  virtual int64_t Send(const void* data, int64_t bytes) = 0;
  // What comes for null is dropped.
  virtual int64_t Receive(void* data, int64_t bytes) = 0;

  // Moves what can be moved without waiting. Returns whether anything was.
  bool Progress() {
    const int64_t sent_before = sent();
    const bool moved = Move();
    if (carried_ != nullptr) carried_->fetch_add(sent() - sent_before);
    return moved;
  }

  // How many bytes have been sent and received, of all that were ever posted.
  int64_t sent() const { return sent_.moved; }
  int64_t received() const { return received_.moved; }
  // What they are going to be.
  int64_t to_send() const { return sent_.posted; }
  int64_t to_receive() const { return received_.posted; }
  // Whether anything posted is not yet complete.
  bool sends() const { return sent_.waits(); }
  bool receives() const { return received_.waits(); }
  // Whether a thread that sleeps is woken by what comes. Without it, Progress must be
  // called again and again until nothing posted waits.
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
  // Forgets what is posted and moves nothing more: its memory may go.
  virtual void Abandon() = 0;

  // Where to count what is sent from now on.
  void set_carried(std::shared_ptr<std::atomic<int64_t>> carried) {
    carried_ = std::move(carried);
  }

 protected:
  // What was posted, and how much of it has been moved.
  struct Progressed {
    int64_t posted = 0;
    int64_t moved = 0;

    bool waits() const { return moved < posted; }
  };

  // `limit`: after how long without an answer the other host counts as gone.
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
