// See submission_writer.h.
#include "tf_ops/engine/submission_writer.h"

#include <chrono>

#include "tf_ops/engine/inline_tensors.h"
#include "tf_ops/transport/faults.h"

namespace keras_hvd {

SubmissionWriter::SubmissionWriter(Segment* segment, int rank, size_t cache_capacity)
    : block_(segment->block(rank)),
      stream_(segment->submissions(rank), Segment::kSubmissionBytes,
              &block_.submissions_written),
      numbers_(cache_capacity) {}

void SubmissionWriter::WriteTime(Clock::time_point submitted) {
  const std::chrono::nanoseconds time = submitted.time_since_epoch();
  time_message_.clear();
  EncodeInteger(static_cast<int64_t>(SubmissionMessage::kTime), &time_message_);
  EncodeInteger(time.count(), &time_message_);
  stream_.Append(time_message_);
}

void SubmissionWriter::Write(const Description& description, bool duplicate,
                             const Operation* inlined) {
  std::string encoded;
  Encode(description, &encoded);
  bool is_new;
  numbers_.Reserve(1);
  const int64_t number = numbers_.Number(encoded, &is_new);
  std::string message;
  if (is_new) {
    EncodeInteger(static_cast<int64_t>(SubmissionMessage::kDefine), &message);
    EncodeInteger(number, &message);
    stream_.Append(message + encoded);
    message.clear();
  }
  SubmissionMessage type = SubmissionMessage::kSubmit;
  if (duplicate) type = SubmissionMessage::kSubmitDuplicate;
  if (inlined != nullptr) type = SubmissionMessage::kSubmitInput;
  EncodeInteger(static_cast<int64_t>(type), &message);
  EncodeInteger(number, &message);
  if (inlined != nullptr) AppendInputs(*inlined, &message);
  stream_.Append(message);
  stream_.Flush(block_.submissions_read.value.load(std::memory_order_acquire));
  // What did not fit is for who drives, who can wait for room.
  overflows_.store(stream_.blocked());
  if (stream_.blocked()) block_.bell.Ring();
}

bool SubmissionWriter::Flush() {
  bool flushed = false;
  while (stream_.blocked()) {
    if (stream_.Flush(block_.submissions_read.value.load())) {
      flushed = true;
      continue;
    }
    // Announced, then looked at again: the reader either sees this or has made room.
    BeforeStore();
    if (block_.submissions_blocked.exchange(1) == 1) break;
  }
  overflows_.store(stream_.blocked());
  return flushed;
}

}  // namespace keras_hvd
