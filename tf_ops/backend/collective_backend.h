// Moves and reduces tensors in host memory among the members of a batch.
//
// Only the driving thread uses this. Functions that return a bool return false if the
// job has failed meanwhile or this rank stops waiting.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tf_ops/collectives/joint_attempt.h"
#include "tf_ops/collectives/phase_recorder.h"
#include "tf_ops/coordination/autotune.h"
#include "tf_ops/operation/operation.h"

namespace keras_hvd {

class CollectiveBackend {
 public:
  virtual ~CollectiveBackend() = default;

  // Begins a collective of `members`: ascending ranks, including this one. All members
  // count batches alike; this batch has number `number`.
  virtual bool Begin(const std::vector<int>& members, uint64_t number) = 0;
  // Ends the current collective and begins another with the same members.
  virtual bool BeginAgain() = 0;
  virtual void End() = 0;

  // ---- One of these for each collective that has begun

  // Runs the collective of the batch's kind. `tuning` is the same on all members.
  virtual bool Run(const Batch& batch, const Tuning& tuning) = 0;
  // Gives every member the numbers of all members: `(*all)[member]` in the order of
  // `own`, which has the same length on every member.
  virtual bool AllgatherValues(const std::vector<int64_t>& own,
                               std::vector<std::vector<int64_t>>* all) = 0;
  // An attempt that all members make together.
  virtual std::unique_ptr<JointAttempt> Attempt() = 0;

  // Gives every member the hashes of all members. May follow Run.
  virtual bool AllgatherHashes(const std::vector<uint64_t>& own,
                               std::vector<std::vector<uint64_t>>* all) = 0;

  // ---- Window size and recording

  // The largest part of a tensor that is moved at once.
  virtual int64_t window_bytes() const = 0;
  // Records all later collectives; null ends recording.
  virtual void set_recorder(PhaseRecorder* recorder) = 0;
};

}  // namespace keras_hvd
