// The coordinator's side of coordination: passes the ranks' submissions to the
// coordinator and its decisions to the ranks.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tf_ops/backend/world.h"
#include "tf_ops/coordination/autotune.h"
#include "tf_ops/coordination/coordinator.h"
#include "tf_ops/coordination/messages.h"
#include "tf_ops/coordination/submission_merger.h"
#include "tf_ops/engine/submission_reader.h"
#include "tf_ops/timeline/timeline.h"

namespace keras_hvd {

class CoordinatorService {
 public:
  // `cache_capacity`: how many tensors travel as numbers.
  CoordinatorService(const World& world, int64_t fusion_bytes, size_t cache_capacity,
                     Timeline* timeline);

  // Makes the job search for better settings. Call before anything is decided.
  void StartAutotune(const AutotuneOptions& options, const Tuning& defaults);
  bool tunes() const { return autotune_ != nullptr && !autotune_->done(); }
  // While it tunes: the coordinator has carried out the last kTune, or has run a batch.
  void NoteTuned() { autotune_->Begin(); }
  void NoteRun(const std::vector<TensorKey>& tensors, int64_t bytes);

  // Does the work that can be done without waiting. Returns true if there was any.
  bool Poll();
  // Whether Poll has something to do: submissions to read, or anything else.
  bool HasSubmissions() const { return reader_.HasSubmissions(); }
  bool HasNews() const;
  // Reports each request that has waited for more than `warning` seconds once. Fails
  // the job if one has waited for more than `abort` seconds (0: never). Asks others for
  // signs of life after half of `patience` seconds. Ranks that have joined may wait as
  // long as others go on: that is reported once, and fails nothing.
  void CheckStalls(double warning, double abort, double patience);
  bool anything_waits() const {
    return anything_waits_ || (merger_ != nullptr && merger_->anything_waits());
  }

  // This rank leaves the job of several hosts. From now on nothing more is decided.
  void BeginToLeave();
  // Ranks that have not carried out all decisions. Others may wait for them on their
  // GPUs, and would not hear that one of them has left.
  std::vector<int> NeededBy();
  // Hears of departures for the last time.
  void Leave();

 private:
  // The last run of a process set's members on their GPUs, and its decision.
  struct LastRun {
    RankSet members;
    std::shared_ptr<const Description> description;
    int64_t decision = 0;
  };

  SubmissionReader::Listener Listener();
  bool Decide();
  void TakeMerged();
  void Submit(MergedSubmission submission);
  void Leave(const RankDeparture& departure);
  std::string HowItLeft(const RankDeparture& departure, const std::string& what) const;
  void CheckRuns(const RankDeparture& departure);
  void CheckRun(const LastRun& last, const RankDeparture& departure);
  void NoteGpuRun(const Decision& decision);
  void NoteAddition(const Decision& decision);
  void NoteLast(const LastRun& last);
  // Sends the messages queued for the ranks. Returns true if there were any.
  bool Send();
  void WriteDecision(const Decision& decision);
  void Queue(std::string_view message);
  void WriteTuning();
  void WriteAutotuneLog();
  std::string SilenceText(int leader) const;
  std::string StallText(const Stall& stall, double seconds);
  void WarnOfJoin(const Stall& join, double seconds);

  const std::shared_ptr<JobState> job_;
  const Topology topology_;
  Timeline& timeline_;
  Coordinator coordinator_;
  // Null if all ranks are on one host. Otherwise merging the messages of many hosts
  // costs less than keeping them apart.
  const std::unique_ptr<SubmissionMerger> merger_;
  SubmissionReader reader_;
  // By process set, also of removed ones: some member may not have come to its run yet.
  std::unordered_map<int32_t, LastRun> last_gpu_runs_;
  std::map<int, RankDeparture> departures_;  // by rank
  bool uses_gpus_ = false;                   // some rank does
  bool leaves_ = false;
  int64_t queued_ = 0;    // decisions; ranks count them alike
  double now_ = 0;        // when reading began, in seconds
  uint64_t batches_ = 0;  // and new process sets, decided; ranks count them alike
  DecisionEncoder encoder_;
  const std::unique_ptr<MessageSender> decisions_;
  const std::unique_ptr<MessageSender> below_;  // null: no host is below
  std::unique_ptr<Autotune> autotune_;          // null: off
  std::string autotune_log_;  // its file; "" if there is none or writing it failed
  std::unordered_map<TensorKey, double, TensorKeyHash> warned_;
  double warned_of_join_ = 0;  // the time of its first rank's
  bool anything_waits_ = false;
};

}  // namespace keras_hvd
