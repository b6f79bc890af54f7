// See byte_stream.h.
#include "tf_ops/transport/byte_stream.h"

#include <algorithm>

#include "tf_ops/transport/faults.h"

namespace keras_hvd {

void StreamWriter::Append(std::string_view message) {
  const uint32_t length = static_cast<uint32_t>(message.size());
  waiting_.append(reinterpret_cast<const char*>(&length), sizeof(length));
  waiting_.append(message);
}

bool StreamWriter::Flush(uint64_t slowest_read) {
  uint64_t position = written_->value.load(std::memory_order_relaxed);
  const uint64_t room = capacity_ - (position - slowest_read);
  const uint64_t count = std::min<uint64_t>(room, waiting_.size() - sent_);
  if (count == 0) return false;
  const uint64_t offset = position % capacity_;
  const uint64_t until_end = std::min(count, capacity_ - offset);
  memcpy(memory_ + offset, waiting_.data() + sent_, until_end);
  memcpy(memory_, waiting_.data() + sent_ + until_end, count - until_end);
  BeforeStore();
  written_->value.store(position + count, std::memory_order_release);
  sent_ += count;
  if (sent_ == waiting_.size()) {
    waiting_.clear();
    sent_ = 0;
  }
  return true;
}

bool StreamReader::Fill() {
  const uint64_t written = written_->value.load(std::memory_order_acquire);
  const uint64_t position = read_->value.load(std::memory_order_relaxed);
  const uint64_t count = written - position;
  if (count == 0) return false;
  buffer_.erase(0, taken_);
  taken_ = 0;
  const uint64_t offset = position % capacity_;
  const uint64_t until_end = std::min(count, capacity_ - offset);
  buffer_.append(memory_ + offset, until_end);
  buffer_.append(memory_, count - until_end);
  BeforeStore();
  read_->value.store(written, std::memory_order_release);
  return true;
}

bool StreamReader::Next(std::string_view* message) {
  uint32_t length;
  const size_t left = buffer_.size() - taken_;
  if (left < sizeof(length)) return false;
  memcpy(&length, buffer_.data() + taken_, sizeof(length));
  if (left - sizeof(length) < length) return false;
  *message = std::string_view(buffer_).substr(taken_ + sizeof(length), length);
  taken_ += sizeof(length) + length;
  return true;
}

}  // namespace keras_hvd
