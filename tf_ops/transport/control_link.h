// A connection between ranks of two hosts, for everything but tensors.
//
// It carries frames: a type and any bytes, complete and in order. Neither end ever
// blocks: bytes that the socket does not take wait here until a later Flush.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "tf_ops/transport/connection.h"
#include "tf_ops/transport/doorbell.h"
#include "tf_ops/transport/peer_clock.h"

namespace keras_hvd {

// The type of a frame. The numbers travel.
enum class FrameType : uint8_t {
  kSubmission = 1,  // up: a message of a MergedEncoder
  kDecision = 2,    // down: a message of a DecisionEncoder
  kFailure = 3,     // both ways: the job has failed
  kSettings = 4,    // down: the coordinator's settings for all
  kDeparture = 5,   // both ways: the sender leaves the job, and leads no longer
  kKnown = 6,       // up: the failure is known here and below; the ranks' last acts
  kAllKnow = 7,     // down: the failure is known everywhere
  kQuestion = 8,    // both ways: whether the receiver's engine still runs
  kSign = 9,        // both ways: that it does, with the state of each process of its
                    // host; passed on upwards
  kBatch = 10,      // up: a batch that a host has carried out, for the timeline
  kCarriedOut = 11  // down: whether as many decisions have been carried out by all from
                    // the receiver on; up: that they have
};

// Only one thread may use it at a time.
class ControlLink {
 public:
  // Takes over the socket and the session as Connection does. `peer`: a leader.
  ControlLink(int socket, int peer, std::unique_ptr<TlsSession> tls = nullptr);
  ControlLink(const ControlLink&) = delete;
  ControlLink& operator=(const ControlLink&) = delete;

  int socket() const { return connection_.socket(); }
  int peer() const { return peer_; }

  // Adds a frame for Flush to send.
  void Queue(FrameType type, std::string_view bytes);
  // Sends the bytes that the socket takes. Returns true if there were any.
  bool Flush();
  bool has_unsent() const { return sent_ < unsent_.size() && why_closed_.empty(); }
  // Sends the queued frames and then nothing more, which the peer sees as an end. Waits
  // for the peer until `deadline` at most.
  void Finish(Clock::time_point deadline);
  // Discards the bytes that come until the peer has finished too: if it closed with
  // bytes unread, the peer might never get the last ones that were sent.
  void AwaitEnd(Clock::time_point deadline);

  // Takes in the bytes that have come. Returns true if there were any.
  bool Receive();
  // Gives the next complete frame, valid until the next Next or Receive. Returns false
  // if there is none.
  bool Next(FrameType* type, std::string_view* bytes);
  // When that frame was queued, by this host's clock.
  Clock::time_point sent_at() const { return sent_at_; }

  // Why nothing more comes or goes, as in "it was closed"; "" while it is open.
  const std::string& why_closed() const { return why_closed_; }
  // Whether that is because the other host does not answer.
  bool is_unreachable() const { return connection_.is_unreachable(); }
  // Whether this end has ended it, because of wrong bytes that came.
  bool has_refused() const { return has_refused_; }

 private:
  void Close(const std::string& why);
  void Refuse(const std::string& what);
  void NoteRead(Clock::time_point now);
  bool Await(short events, Clock::time_point deadline) const;

  Connection connection_;
  const int peer_;
  std::string unsent_;
  size_t sent_ = 0;  // bytes of unsent_
  std::string received_;
  size_t taken_ = 0;  // bytes of received_ that Next has given out
  PeerClock clock_;
  std::chrono::microseconds delay_{0};  // of a small message
  Clock::time_point measured_{};        // when that was
  Clock::time_point read_at_{};         // when something came last
  Clock::time_point told_{};            // the latest time by the other host's clock
  Clock::time_point sent_at_{};
  std::string why_closed_;
  bool has_refused_ = false;
};

}  // namespace keras_hvd
