// See submission_writer.h.
#include "tf_ops/engine/submission_writer.h"

#include "tf_ops/transport/faults.h"

namespace keras_hvd {

SubmissionWriter::SubmissionWriter(Segment* segment, int rank)
    : block_(segment->block(rank)),
      stream_(segment->submissions(rank), Segment::kSubmissionBytes,
              &block_.submissions_written) {}

void SubmissionWriter::Write(std::string_view message) {
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
