// Messages between ranks: complete, in order, and of any length.
//
// Neither end ever blocks. When a receiver has no room, the rest of a message stays
// with the sender until a later Flush. A receiver that makes room wakes the sender's
// rank.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "tf_ops/transport/doorbell.h"

namespace keras_hvd {

// Sends to one rank, or the same messages to several. Except for CanFlush, only one
// thread may call it at a time.
class MessageSender {
 public:
  virtual ~MessageSender() = default;

  // Adds a message for Flush to send. CanFlush ignores the message until then.
  virtual void Queue(std::string_view message) = 0;
  // Sends as much as there is room for. Returns true if it sent anything. It does not
  // notify the receivers: the caller rings for them.
  virtual bool Flush() = 0;
  // Whether messages found no room and there may be some by now. Any thread may call
  // it.
  virtual bool CanFlush() const = 0;
  // Whether messages wait for room.
  virtual bool has_unsent() const = 0;
  // A receiver has left and must no longer hold up the others. Once none are left,
  // messages are discarded.
  virtual void Drop(int receiver) = 0;
};

// Receives from one rank. Only one thread may call it at a time.
class MessageReceiver {
 public:
  virtual ~MessageReceiver() = default;

  // Whether Receive would find anything.
  virtual bool HasNews() const = 0;
  // Takes in the bytes that have arrived. Returns true if there were any.
  virtual bool Receive() = 0;
  // Gives the next complete message, valid until the next Next or Receive. Returns
  // false if there is none.
  virtual bool Next(std::string_view* message) = 0;
  // When the one that Next gave last was sent, by this host's clock; at the latest, if
  // it comes from this host.
  virtual Clock::time_point SentAt() const { return Clock::now(); }
};

// Makes one rank's ends of the job's channels, each once.
class Channels {
 public:
  virtual ~Channels() = default;

  // For submissions and decisions. The coordinator is the leader of its host.
  virtual std::unique_ptr<MessageSender> ToLeader() = 0;
  virtual std::unique_ptr<MessageReceiver> FromLeader() = 0;

  // A leader's ends: from each rank of its host and to all of them, including itself.
  virtual std::vector<std::unique_ptr<MessageReceiver>> FromRanks() = 0;
  virtual std::unique_ptr<MessageSender> ToRanks() = 0;
  // The same from and to the leaders of the hosts directly below.
  virtual std::vector<std::unique_ptr<MessageReceiver>> FromBelow() { return {}; }
  virtual std::unique_ptr<MessageSender> ToBelow() { return nullptr; }
  // To and from the leader above; null for the coordinator, and for ranks that do not
  // lead.
  virtual std::unique_ptr<MessageSender> ToAbove() { return nullptr; }
  virtual std::unique_ptr<MessageReceiver> FromAbove() { return nullptr; }
};

}  // namespace keras_hvd
