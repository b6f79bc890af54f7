// How messages pass between ranks: each of any length, whole, and in order.
//
// No end ever waits. What a receiver has no room for yet stays with the sender, whose
// Flush sends more of it later; a receiver that makes room wakes the sender's rank.
#ifndef KERAS_HVD_TF_OPS_TRANSPORT_CHANNEL_H_
#define KERAS_HVD_TF_OPS_TRANSPORT_CHANNEL_H_

#include <memory>
#include <string_view>
#include <vector>

namespace keras_hvd {

// Sends to one rank, or the same to several. One thread at a time, but for CanFlush.
class MessageSender {
 public:
  virtual ~MessageSender() = default;

  // Adds a message to what Flush sends; CanFlush says nothing of it before that.
  virtual void Queue(std::string_view message) = 0;
  // Sends what there is room for. Returns true if it has sent anything, of which it
  // does not tell the receivers: they are to be rung for.
  virtual bool Flush() = 0;
  // Any thread: whether messages have found no room, and there may be some by now.
  virtual bool CanFlush() const = 0;
  // A receiver has left and takes nothing any more: it must not hold up the others.
  // What is sent when none is left goes nowhere.
  virtual void Drop(int receiver) = 0;
};

// Receives from one rank. One thread at a time.
class MessageReceiver {
 public:
  virtual ~MessageReceiver() = default;

  // Whether Receive would find anything.
  virtual bool HasNews() const = 0;
  // Takes in what has come. Returns true if it was anything.
  virtual bool Receive() = 0;
  // Gives the next message that is whole, valid until the next call of either; false if
  // there is none.
  virtual bool Next(std::string_view* message) = 0;
};

// Makes the ends of a job's channels that one rank has, each once.
class Channels {
 public:
  virtual ~Channels() = default;

  virtual std::unique_ptr<MessageSender> ToCoordinator() = 0;
  virtual std::unique_ptr<MessageReceiver> FromCoordinator() = 0;
  // The coordinator's: from each rank, and to all of them. It is one of them.
  virtual std::vector<std::unique_ptr<MessageReceiver>> FromRanks() = 0;
  virtual std::unique_ptr<MessageSender> ToRanks() = 0;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_TRANSPORT_CHANNEL_H_
