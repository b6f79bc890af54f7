// The part of a host's leader that is not the coordinator: passes the submissions of
// its host's ranks and those below to the leader above, merged, and the decisions from
// there to all of them.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "tf_ops/backend/world.h"
#include "tf_ops/coordination/messages.h"
#include "tf_ops/coordination/submission_merger.h"
#include "tf_ops/engine/submission_reader.h"

namespace keras_hvd {

// Only the driving thread uses this class.
class LeaderService {
 public:
  // `cache_capacity`: how many descriptions travel as numbers.
  LeaderService(const World& world, size_t cache_capacity);

  // Does the work that can be done without waiting. Returns true if there was any.
  bool Poll();
  // Whether Poll has something to do: submissions to read, or anything else.
  bool HasSubmissions() const { return reader_.HasSubmissions(); }
  bool HasNews() const;

  // Passes on the submissions that wait for others below. Called from time to time, so
  // that the coordinator can tell who waits for whom.
  void PassOnOld();
  bool anything_waits() const { return merger_.anything_waits(); }

  // This rank leaves the job. From now on it passes nothing more down.
  void BeginToLeave();
  // Ranks below that have not carried out all decisions passed down. Others may wait
  // for them on their GPUs, and would not hear that one of them has left.
  std::vector<int> NeededBy();
  // With this rank all ranks below leave, which reach nobody any more.
  void Leave();

 private:
  bool HasAnswer();
  bool PassUp();
  bool PassDown();
  Status Note(std::string_view decision);

  const std::shared_ptr<JobState> job_;
  const std::vector<int> ranks_;  // all below, with those of this host
  SubmissionMerger merger_;
  SubmissionReader reader_;
  std::vector<Upward> passed_;  // on to the leader above
  MergedEncoder encoder_;
  DecisionDecoder decoder_;
  DecisionMessage decision_;  // that was read last
  int64_t passed_down_ = 0;   // decisions; ranks count them alike
  bool uses_gpus_ = false;    // some rank below does
  bool leaves_ = false;
  const std::unique_ptr<MessageSender> above_;
  const std::unique_ptr<MessageReceiver> from_above_;
  const std::unique_ptr<MessageSender> local_;
  const std::unique_ptr<MessageSender> below_;  // null: no host is below
};

}  // namespace keras_hvd
