// A channel through shared memory: a ring of bytes with one sender and one or more
// receivers.
//
// The sender's position only grows; bytes are stored at position modulo capacity. The
// sender is never ahead of the slowest receiver by more than the capacity. Longer
// messages pass in pieces.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tf_ops/transport/channel.h"
#include "tf_ops/transport/doorbell.h"
#include "tf_ops/transport/segment.h"

namespace keras_hvd {

class SharedMemorySender final : public MessageSender {
 public:
  // `read`: the position of each receiver.
  SharedMemorySender(char* memory, uint64_t capacity, RingState* state,
                     std::vector<const SharedCounter*> read)
      : memory_(memory), capacity_(capacity), state_(*state), read_(std::move(read)) {}

  void Queue(std::string_view message) override;
  bool Flush() override;
  bool CanFlush() const override {
    return has_no_room_.load() && state_.sender_waits.load() == 0;
  }
  bool has_unsent() const override { return !queued_.empty(); }
  void Drop(int receiver) override { read_[receiver] = nullptr; }

 private:
  bool SendWhatFits();

  char* const memory_;
  const uint64_t capacity_;
  RingState& state_;
  std::vector<const SharedCounter*> read_;  // null: dropped
  std::string queued_;
  size_t sent_ = 0;  // bytes of queued_
  std::atomic<bool> has_no_room_{false};
};

class SharedMemoryReceiver final : public MessageReceiver {
 public:
  // `sender` is rung when there is room again.
  SharedMemoryReceiver(const char* memory, uint64_t capacity, RingState* state,
                       SharedCounter* read, Doorbell* sender)
      : memory_(memory),
        capacity_(capacity),
        state_(*state),
        read_(*read),
        sender_(*sender) {}

  bool HasNews() const override {
    return state_.written.value.load(std::memory_order_acquire) !=
           read_.value.load(std::memory_order_relaxed);
  }
  bool Receive() override;
  bool Next(std::string_view* message) override;

 private:
  const char* const memory_;
  const uint64_t capacity_;
  RingState& state_;
  SharedCounter& read_;
  Doorbell& sender_;
  std::string buffer_;
  size_t taken_ = 0;  // bytes of buffer_ that Next has given out
};

// The channels of ranks that share a segment.
class SharedMemoryChannels : public Channels {
 public:
  // `index`: this rank's among those that share the segment.
  SharedMemoryChannels(std::shared_ptr<Segment> segment, int index)
      : segment_(std::move(segment)), index_(index) {}

  std::unique_ptr<MessageSender> ToLeader() override;
  std::unique_ptr<MessageReceiver> FromLeader() override;
  std::vector<std::unique_ptr<MessageReceiver>> FromRanks() override;
  std::unique_ptr<MessageSender> ToRanks() override;

 private:
  const std::shared_ptr<Segment> segment_;
  const int index_;
};

}  // namespace keras_hvd
