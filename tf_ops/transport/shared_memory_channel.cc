#include "tf_ops/transport/shared_memory_channel.h"

#include <algorithm>
#include <cstring>

#include "tf_ops/transport/faults.h"

namespace keras_hvd {

// Its index among the ranks of the host.
constexpr int kLeader = 0;

// ---- The sender

void SharedMemorySender::Queue(std::string_view message) {
  const uint32_t length = static_cast<uint32_t>(message.size());
  queued_.append(reinterpret_cast<const char*>(&length), sizeof(length));
  queued_.append(message);
}

bool SharedMemorySender::Flush() {
  bool sent = false;
  while (!queued_.empty()) {
    if (SendWhatFits()) {
      sent = true;
      continue;
    }
    // Announce, then check again: a receiver either sees the announcement or has
    // already made room. Set the flag first, because a rank that is rung at once looks
    // at it.
    has_no_room_.store(true);
    FaultPoint();
    if (state_.sender_waits.exchange(1) == 1) return sent;
  }
  if (has_no_room_.load(std::memory_order_relaxed)) has_no_room_.store(false);
  return sent;
}

bool SharedMemorySender::SendWhatFits() {
  const uint64_t position = state_.written.value.load(std::memory_order_relaxed);
  uint64_t slowest = position;
  for (const SharedCounter* read : read_) {
    if (read == nullptr) continue;
    slowest = std::min(slowest, read->value.load(std::memory_order_acquire));
  }
  const uint64_t room = capacity_ - (position - slowest);
  const uint64_t count = std::min<uint64_t>(room, queued_.size() - sent_);
  if (count == 0) return false;
  const uint64_t offset = position % capacity_;
  const uint64_t until_end = std::min(count, capacity_ - offset);
  memcpy(memory_ + offset, queued_.data() + sent_, until_end);
  memcpy(memory_, queued_.data() + sent_ + until_end, count - until_end);
  FaultPoint();
  state_.written.value.store(position + count, std::memory_order_release);
  sent_ += count;
  if (sent_ == queued_.size()) {
    queued_.clear();
    sent_ = 0;
  }
  return true;
}

// ---- The receiver

bool SharedMemoryReceiver::Receive() {
  const uint64_t written = state_.written.value.load(std::memory_order_acquire);
  const uint64_t position = read_.value.load(std::memory_order_relaxed);
  const uint64_t count = written - position;
  if (count == 0) return false;
  buffer_.erase(0, taken_);
  taken_ = 0;
  const uint64_t offset = position % capacity_;
  const uint64_t until_end = std::min(count, capacity_ - offset);
  buffer_.append(memory_ + offset, until_end);
  buffer_.append(memory_, count - until_end);
  FaultPoint();
  read_.value.store(written, std::memory_order_release);
  FaultPoint();
  if (state_.sender_waits.exchange(0) == 1) sender_.Ring();
  return true;
}

bool SharedMemoryReceiver::Next(std::string_view* message) {
  uint32_t length;
  const size_t left = buffer_.size() - taken_;
  if (left < sizeof(length)) return false;
  memcpy(&length, buffer_.data() + taken_, sizeof(length));
  if (left - sizeof(length) < length) return false;
  *message = std::string_view(buffer_).substr(taken_ + sizeof(length), length);
  taken_ += sizeof(length) + length;
  return true;
}

// ---- Those of a job

std::unique_ptr<MessageSender> SharedMemoryChannels::ToLeader() {
  RankBlock& block = segment_->block(index_);
  return std::make_unique<SharedMemorySender>(
      segment_->submissions(index_), Segment::kSubmissionBytes, &block.submissions,
      std::vector<const SharedCounter*>{&block.submissions_read});
}

std::unique_ptr<MessageReceiver> SharedMemoryChannels::FromLeader() {
  return std::make_unique<SharedMemoryReceiver>(
      segment_->decisions(), Segment::kDecisionBytes, &segment_->header().decisions,
      &segment_->block(index_).decisions_read, &segment_->block(kLeader).bell);
}

std::vector<std::unique_ptr<MessageReceiver>> SharedMemoryChannels::FromRanks() {
  std::vector<std::unique_ptr<MessageReceiver>> receivers;
  for (int index = 0; index < segment_->size(); ++index) {
    RankBlock& block = segment_->block(index);
    receivers.push_back(std::make_unique<SharedMemoryReceiver>(
        segment_->submissions(index), Segment::kSubmissionBytes, &block.submissions,
        &block.submissions_read, &block.bell));
  }
  return receivers;
}

std::unique_ptr<MessageSender> SharedMemoryChannels::ToRanks() {
  std::vector<const SharedCounter*> read;
  for (int index = 0; index < segment_->size(); ++index) {
    read.push_back(&segment_->block(index).decisions_read);
  }
  return std::make_unique<SharedMemorySender>(segment_->decisions(),
                                              Segment::kDecisionBytes,
                                              &segment_->header().decisions, read);
}

}  // namespace keras_hvd
