// See work.h.
#include "tf_ops/engine/work.h"

#include <utility>

#include "tf_ops/engine/job_failure.h"

namespace keras_hvd {
namespace {

std::unique_ptr<CoordinatorService> CoordinatorServiceOf(const EngineOptions& options,
                                                         const World& world,
                                                         Timeline* timeline) {
  if (!world.job->is_coordinator()) return nullptr;
  return std::make_unique<CoordinatorService>(world, options.fusion_bytes,
                                              options.cache_capacity, timeline);
}

}  // namespace

Work::Work(const EngineOptions& options, const World& world,
           std::shared_ptr<GpuAccess> gpu, Waiter* waiter, Requests* requests,
           SpinPolicy* spin_policy, Timeline* timeline, EngineCounters* counters)
    : job_(world.job),
      requests_(*requests),
      coordinator_service_(CoordinatorServiceOf(options, world, timeline)),
      execution_(options, world, std::move(gpu), waiter, requests, spin_policy,
                 timeline,
                 coordinator_service_ == nullptr ? nullptr
                                                 : coordinator_service_->store_choice(),
                 counters),
      stall_watch_(options, job_, requests, coordinator_service_.get(), &execution_) {
  if (coordinator_service_ == nullptr) return;
  // Before the first decision, which the others read before this setting.
  job_->set_compares_outputs(options.check);
  if (!options.autotune.on || job_->size() == 1) return;
  AutotuneOptions autotune = options.autotune;
  autotune.tunes_spin = options.cores >= world.topology.local_size();
  autotune.most_window_bytes = execution_.window_bytes();
  Tuning defaults;
  defaults.fusion_bytes = options.fusion_bytes;
  coordinator_service_->StartAutotune(autotune, defaults);
  execution_.set_observer(
      {[this] { coordinator_service_->NoteTuned(); },
       [this](const std::vector<TensorKey>& tensors, int64_t bytes) {
         if (bytes > 0 && coordinator_service_->tunes()) {
           coordinator_service_->NoteRun(tensors, bytes);
         }
       }});
}

bool Work::Poll() {
  if (has_ended_) return false;
  bool progressed = requests_.Flush();
  if (coordinator_service_ != nullptr) progressed |= coordinator_service_->Poll();
  progressed |= execution_.Read();
  stall_watch_.Check();
  execution_.gpu().Check();
  CheckCoordinatorLeft();
  return progressed;
}

bool Work::RunNext() {
  if (has_ended_) return false;
  if (job_->Failed()) {
    HandleFailure();
    return true;
  }
  if (!execution_.anything_to_do()) return false;
  execution_.CarryOutNext();
  return true;
}

// Nothing can be decided without the coordinator's own submission. Hence it sleeps
// through others' submissions while it has none under way, unless some process set does
// not contain it.
uint32_t Work::Listening() const {
  const bool decides = execution_.decides_for_others() || requests_.any_pending();
  return Doorbell::kNews | (decides ? Doorbell::kSubmission : 0);
}

bool Work::HasNews(uint32_t listening) {
  if (has_ended_) return false;
  if (job_->Failed() || execution_.HasNews()) return true;
  if (coordinator_service_ != nullptr) {
    if (coordinator_service_->HasNews()) return true;
    const bool listens = (listening & Doorbell::kSubmission) != 0;
    if (listens && coordinator_service_->HasSubmissions()) return true;
  }
  return requests_.CanFlush();
}

// One rank reports for all, including what each rank did last.
void Work::HandleFailure() {
  has_ended_ = true;
  execution_.gpu().Abort();
  ReportFailureOnce(job_.get());
  const Status reason = ReasonOfEnd(*job_);
  requests_.EndAll(reason.code, reason.message);
}

void Work::Leave() {
  if (job_->Failed()) {
    execution_.gpu().Abort();
  } else {
    execution_.gpu().Leave();
  }
}

// Without the coordinator nothing more is decided. Its earlier decisions are carried
// out.
void Work::CheckCoordinatorLeft() {
  if (job_->is_coordinator() || execution_.anything_to_do()) return;
  if (job_->has_departed()) return;
  if (!job_->HasShutDown(JobState::kCoordinator) || execution_.HasNews()) return;
  if (!requests_.any_pending() || job_->Failed()) return;
  job_->Fail(Code::kRankFailed,
             job_->Describe(JobState::kCoordinator) +
                 " has left the job: its script ended or called shutdown, while others "
                 "still needed it. Rank 0 decides for all process sets");
}

}  // namespace keras_hvd
