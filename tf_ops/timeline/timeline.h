// The timeline: the coordinator's view of the time that each tensor takes, written to a
// file while the job runs.
//
// The driving thread only records times, in a ring of fixed size. Another thread makes
// events of them and writes these to the file (timeline_writer.h), with half a percent
// of a core at most. If more is recorded than that can handle, the ring fills up and
// the timeline pauses until there is room again. The file says how much was left out.
//
// A recording (recording.h) adds up the same records, with the timeline or alone.
//
// Only the coordinator writes: it knows when each rank submitted each request. All
// ranks of a host read the same clock. While a timeline is written, they send the time
// along with each submission. No rank waits for another to start or stop the timeline.
#pragma once

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
#include "tf_ops/timeline/recording.h"
#include "tf_ops/timeline/recording_file.h"
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
  // From now until StopAll.
  Status StartRecording(const std::string& path);
  void StopAll();

  // The rest is for the coordinator's driving thread.
  bool on() const { return session_.load(std::memory_order_acquire) != 0; }
  // Whether decisions must tell submission times: the timeline is on and not paused.
  bool WantsTimes() { return on() && HasRoom(0); }
  // A batch was decided; its number is one more than the last batch's. It runs on this
  // rank, or only on others.
  void AddDecision(uint64_t batch, const Decision& decision, bool runs_here);
  void AddCycle();
  // Records requests that have long been waiting for ranks, at `now` in seconds.
  void AddStalls(const std::vector<Stall>& stalls, double now);
  // Records a batch that another host has carried out.
  void AddBatchElsewhere(const BatchElsewhere& batch);
  // A batch begins here. Returns null if it is not recorded. It must then not be ended.
  PhaseRecorder* BeginBatch(uint64_t batch);
  void EndBatch(bool ok);
  void Enter(CollectivePhase phase, int64_t begin, int64_t end) override;
  // The running, recorded batch continues on a GPU until EndOnGpu. Stop waits a moment
  // for that. Returns the record to fill with each phase for AddOnGpu.
  TimelineRecord BeginOnGpu();
  void EndOnGpu();
  void AddOnGpu(const TimelineRecord& phase);
  // Some phases of the batch cannot be timed.
  void SkipOnGpu(const TimelineRecord& phase);

 private:
  bool HasRoom(size_t records);
  TimelineRecord& Add(TimelineRecord::Type type, uint64_t batch);
  void AddRequest(uint64_t batch, const Decision::Request& request);
  void EndPhase(int64_t now);
  void AwaitGpu();

  Status Begin();
  void CloseFile();
  void CloseRecording();
  void End();
  void WriteUntilStopped();
  void Drain(bool all);
  void Pass(const TimelineRecord& record);
  void Flush();
  void AddSkipped();

  const std::shared_ptr<JobState> job_;
  std::unique_ptr<TimelineRing> ring_;
  std::atomic<uint32_t> session_{0};  // 0: off
  std::atomic<bool> mark_cycles_{false};
  std::atomic<int64_t> skipped_requests_{0};
  std::atomic<int64_t> skipped_phases_{0};
  std::atomic<int64_t> started_{0};

  // Used only by the driving thread.
  bool paused_ = false;
  uint32_t driven_session_ = 0;    // session of the members below
  int64_t recorded_from_ = 0;      // earlier submissions are not recorded
  std::deque<uint64_t> to_begin_;  // batches that are recorded and run here
  uint64_t running_ = 0;
  int64_t running_since_ = 0;
  CollectivePhase phase_ = CollectivePhase::kNone;
  int64_t phase_since_ = 0;
  int64_t phase_begin_ = 0, phase_end_ = 0;  // bytes
  std::unordered_map<TensorKey, double, TensorKeyHash> reported_stalls_;

  // Guarded by control_: one thread at a time starts or stops the timeline.
  std::mutex control_;
  std::string path_;
  uint32_t sessions_ = 0;
  std::thread thread_;

  // The destinations of the records. Guarded by written_, which the thread holds while
  // it writes.
  std::mutex written_;
  std::unique_ptr<TimelineFile> file_;
  std::unique_ptr<TimelineWriter> writer_;
  std::unique_ptr<RecordingFile> recording_file_;
  std::unique_ptr<Recording> recording_;
  uint32_t written_session_ = 0;
  int64_t noted_requests_ = 0, noted_phases_ = 0;  // skipped, according to the file
  int64_t skipped_before_ = 0;                     // requests, before the recording
  bool said_failure_ = false;

  std::mutex on_gpu_mutex_;
  std::condition_variable on_gpu_changed_;
  int on_gpu_ = 0;  // batches that have begun there; guarded by on_gpu_mutex_

  std::mutex stop_mutex_;
  std::condition_variable stop_changed_;
  bool stop_ = false;
};

}  // namespace keras_hvd
