// Runs batches of tensors on GPUs: enqueues them after the callers' work on their
// streams. Nobody waits for the GPU.
//
// NCCL moves and reduces the tensors. A rank alone copies its own. Reductions that NCCL
// does not do as the CPU would go through host memory. Everything does if a member
// cannot use NCCL.
//
// Enqueued work is checked until it has run: it may fail, or wait for a peer that has
// died. Then the communicators are aborted, which lets the streams continue. Their
// results are invalid, and the job has failed on all ranks.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tf_ops/collectives/communicator.h"
#include "tf_ops/gpu/gpu_access.h"
#include "tf_ops/gpu/gpu_backend.h"
#include "tf_ops/gpu/gpu_batch.h"
#include "tf_ops/gpu/gpu_clock.h"
#include "tf_ops/gpu/gpu_times.h"
#include "tf_ops/gpu/nccl_communicators.h"
#include "tf_ops/gpu/staging.h"
#include "tf_ops/operation/operation.h"
#include "tf_ops/timeline/timeline.h"
#include "tf_ops/transport/job_state.h"

namespace keras_hvd {

// Only the thread that drives the engine calls it.
class GpuRunner {
 public:
  // `warning_seconds` and `abort_seconds` apply to stalls, as in EngineOptions.
  // `waiter` passes the time.
  GpuRunner(double warning_seconds, double abort_seconds, std::shared_ptr<JobState> job,
            std::shared_ptr<GpuAccess> access, Waiter* waiter, Timeline* timeline);
  ~GpuRunner();
  GpuRunner(const GpuRunner&) = delete;
  GpuRunner& operator=(const GpuRunner&) = delete;

  // Called after a failure, before an abort, which may take seconds: each kernel of
  // NCCL that is enqueued looks for it in its turn. Perhaps not on the driving thread,
  // but in its place.
  void set_before_abort(std::function<void()> call) { before_abort_ = std::move(call); }

  // Enqueues a batch of tensors that are on GPUs on all `members`. Returns false if the
  // job failed or this rank stops waiting. `recorded`: the timeline has begun it.
  bool Run(const Batch& batch, const std::vector<int>& members, HostCollectives* host,
           bool recorded);

  // `all` ranks add or remove a process set. Returns false if the job has failed.
  bool AddProcessSet(int32_t id, const std::vector<int>& members,
                     const std::vector<int>& all, HostCollectives* host);
  bool RemoveProcessSet(int32_t id);

  // Whether enqueued work may still be running.
  bool anything_under_way() const { return !under_way_.empty(); }
  // Checks that work, if it is time to.
  void Check();
  // Waits for that work and leaves the other members: ends this rank's part in the job.
  void Leave();
  // Ends that work because the job has failed.
  void Abort();

 private:
  struct UnderWay {
    std::shared_ptr<const SharedEvent> end;
    std::string title;
    std::vector<int> members;
    uint64_t decision;  // the decision's number
    Clock::time_point since;
    std::vector<cuda::Memory> memory;
    std::unique_ptr<GpuTimes> times;  // null: not recorded
  };

  GpuBatch BatchOf(const Batch& batch, const std::vector<int>& members,
                   HostCollectives* host);
  Status Enqueue(GpuBatch* batch);
  cuda::Stream StreamFor(const GpuBatch& batch) const;
  Status ContinueOn(cuda::Stream stream);
  Status AwaitInputs(GpuBatch* batch);
  Status GiveZeros(Operation* operation, GpuBatch* batch);
  Status Move(GpuBatch* batch);
  Status End(GpuBatch* batch);
  void GiveUp(GpuBatch* batch);
  void GiveUpCall(const nccl::AbortCall& abort);
  void SayStuck();
  void AbortCommunicators();
  bool AwaitUnderWay();
  void CheckUnderWay();
  bool ForgetEnded(size_t together);
  void ForgetFirst();
  uint64_t CurrentDecision() const;
  bool CheckMembers(const std::vector<int>& members, uint64_t decision,
                    const std::string& title);
  void CheckAge(const std::string& title, Clock::time_point since);
  bool KeepWaiting(int64_t polls);
  bool Succeeded(const Status& status) { return Succeeded(status, waits_for_); }
  bool Succeeded(const Status& status, const std::string& title);

  const int rank_;
  const double warning_seconds_;  // negative: never
  const double abort_seconds_;    // 0: never
  const std::shared_ptr<JobState> job_;
  const std::shared_ptr<GpuAccess> access_;
  Waiter& waiter_;
  Timeline& timeline_;
  std::function<void()> before_abort_ = [] {};
  std::shared_ptr<cuda::Gpu> gpu_;  // null: not needed yet
  NcclCommunicators communicators_;
  OneRankBackend one_rank_;
  HostStagingBackend host_staging_;
  Staging staging_;
  GpuClock clock_;
  std::deque<UnderWay> under_way_;
  cuda::Stream last_stream_ = nullptr;  // where the last one of these is
  Clock::time_point next_check_;
  std::string waits_for_;  // the title of the current wait
  std::vector<int> waits_for_members_;
  Clock::time_point waiting_since_;  // when it began
  std::string warned_of_;
};

}  // namespace keras_hvd
