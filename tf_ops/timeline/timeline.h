// The timeline: what the coordinator knows of where the time of each tensor goes,
// written to a file while the job runs.
//
// Who drives the engine only notes times, in a ring of a fixed size; a thread makes
// events of them and writes them down (timeline_writer.h). It takes half a percent of
// a core at most. Where more is noted than that goes through, the ring fills up, and
// the timeline pauses until there is room again; the file says how much it left out.
//
// The coordinator alone writes: it knows when each rank submitted
// what. All ranks of a host read the same clock, and send its time along with what they
// submit while a timeline is written. No rank waits for another to start or to stop it.
#ifndef KERAS_HVD_TF_OPS_TIMELINE_TIMELINE_H_
#define KERAS_HVD_TF_OPS_TIMELINE_TIMELINE_H_

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tf_ops/collectives/phase_recorder.h"
#include "tf_ops/coordination/coordinator.h"
#include "tf_ops/timeline/timeline_file.h"
#include "tf_ops/timeline/timeline_record.h"
#include "tf_ops/timeline/timeline_writer.h"
#include "tf_ops/transport/job_state.h"

namespace keras_hvd {

class Timeline : public PhaseRecorder {
 public:
  explicit Timeline(std::shared_ptr<JobState> job);
  ~Timeline() override;
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // On any thread of the coordinator.
  Status Start(const std::string& path, bool mark_cycles);
  void Stop();

  // The rest is for who drives the coordinator's engine.
  bool on() const { return session_.load(std::memory_order_acquire) != 0; }
  // Whether decisions are to say who submitted what when: it is on and does not pause.
  bool WantsTimes() { return on() && HasRoom(0); }
  // A batch was decided, whose number is one more than that of the one before; it runs
  // on this rank, or on others only.
  void AddDecision(uint64_t batch, const Decision& decision, bool runs_here);
  void AddCycle();
  // What has waited for ranks since long, at `now` in seconds.
  void AddStalls(const std::vector<Stall>& stalls, double now);
  // A batch begins here. Returns null where it is not recorded, and is not to be ended.
  PhaseRecorder* BeginBatch(uint64_t batch);
  void EndBatch(bool ok);
  void Enter(CollectivePhase phase, int64_t begin, int64_t end) override;
  // The recorded batch that runs goes on on a GPU until EndOnGpu; Stop waits for that
  // for a moment. Returns what AddOnGpu is to be given its phases in.
  TimelineRecord BeginOnGpu();
  void EndOnGpu();
  void AddOnGpu(const TimelineRecord& phase);
  // There are phases of the batch that cannot be timed.
  void SkipOnGpu(const TimelineRecord& phase);

 private:
  bool HasRoom(size_t records);
  TimelineRecord& Add(TimelineRecord::Type type, uint64_t batch);
  void AddRequest(uint64_t batch, const Decision::Request& request);
  void EndPhase(int64_t now);
  void AwaitGpu();

  void WriteUntilStopped();
  void Drain(bool all);
  void AddSkipped();

  const std::shared_ptr<JobState> job_;
  std::unique_ptr<TimelineRing> ring_;
  std::atomic<uint32_t> session_{0};  // 0: off
  std::atomic<bool> mark_cycles_{false};
  std::atomic<int64_t> skipped_requests_{0};
  std::atomic<int64_t> skipped_phases_{0};
  std::atomic<int64_t> started_{0};

  // Guarded by whoever drives.
  bool paused_ = false;
  uint32_t driven_session_ = 0;    // that the following belong to
  int64_t recorded_from_ = 0;      // what was submitted before is not recorded
  std::deque<uint64_t> to_begin_;  // batches that are recorded and run here
  uint64_t running_ = 0;
  int64_t running_since_ = 0;
  CollectivePhase phase_ = CollectivePhase::kNone;
  int64_t phase_since_ = 0;
  int64_t phase_begin_ = 0, phase_end_ = 0;  // bytes
  std::unordered_map<TensorKey, double, TensorKeyHash> reported_stalls_;

  // Guarded by control_: one starts or stops it at a time.
  std::mutex control_;
  std::string path_;
  uint32_t sessions_ = 0;
  std::thread thread_;

  // The writing thread's; of others only while there is none.
  std::unique_ptr<TimelineFile> file_;
  std::unique_ptr<TimelineWriter> writer_;
  uint32_t written_session_ = 0;
  int64_t noted_requests_ = 0, noted_phases_ = 0;  // skipped, as far as the file says
  bool said_failure_ = false;

  std::mutex on_gpu_mutex_;
  std::condition_variable on_gpu_changed_;
  int on_gpu_ = 0;  // batches that have begun there; guarded by on_gpu_mutex_

  std::mutex stop_mutex_;
  std::condition_variable stop_changed_;
  bool stop_ = false;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_TIMELINE_TIMELINE_H_
