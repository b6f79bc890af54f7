// The stream in which a rank tells rank 0 what it submits; Coordination reads it.
//
// What does not fit into the stream waits here: whoever submits never waits for room,
// who drives the engine sees to the rest.
#ifndef KERAS_HVD_TF_OPS_ENGINE_SUBMISSION_WRITER_H_
#define KERAS_HVD_TF_OPS_ENGINE_SUBMISSION_WRITER_H_

#include <atomic>
#include <string_view>

#include "tf_ops/transport/byte_stream.h"
#include "tf_ops/transport/segment.h"

namespace keras_hvd {

class SubmissionWriter {
 public:
  SubmissionWriter(Segment* segment, int rank);

  // One thread at a time.
  void Write(std::string_view message);
  // Publishes what waits for room, as far as there is some. Returns true if anything
  // was published.
  bool Flush();

  // Any thread: whether something waits for room, and whether there may be some.
  bool overflows() const { return overflows_.load(); }
  bool CanFlush() const {
    return overflows_.load() && block_.submissions_blocked.load() == 0;
  }

 private:
  RankBlock& block_;
  StreamWriter stream_;
  std::atomic<bool> overflows_{false};
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_ENGINE_SUBMISSION_WRITER_H_
