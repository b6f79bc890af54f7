// The stream in which a rank tells rank 0 what it submits; Coordination reads it.
//
// What does not fit into the stream waits here: whoever submits never waits for room,
// who drives the engine sees to the rest.
#ifndef KERAS_HVD_TF_OPS_ENGINE_SUBMISSION_WRITER_H_
#define KERAS_HVD_TF_OPS_ENGINE_SUBMISSION_WRITER_H_

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>

#include "tf_ops/engine/coordination.h"
#include "tf_ops/engine/description.h"
#include "tf_ops/engine/operation.h"
#include "tf_ops/transport/segment.h"

namespace keras_hvd {

class SubmissionWriter {
 public:
  // `cache_capacity`: how many descriptions travel as numbers.
  SubmissionWriter(Segment* segment, int rank, size_t cache_capacity);

  // One thread at a time. `inlined`: whose tensors travel along, if they do.
  void Write(const Description& description, bool duplicate, const Operation* inlined);
  // When the next one was submitted: rank 0 may read it much later.
  void WriteTime(Clock::time_point submitted);
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
  NumberTable<std::string> numbers_;
  std::string time_message_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_ENGINE_SUBMISSION_WRITER_H_
