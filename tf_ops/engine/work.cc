#include "tf_ops/engine/work.h"

#include <string>
#include <utility>

#include "tf_ops/engine/job_failure.h"
#include "tf_ops/transport/threads.h"

namespace keras_hvd {
namespace {

std::unique_ptr<CoordinatorService> CoordinatorServiceOf(const EngineOptions& options,
                                                         const World& world,
                                                         Timeline* timeline) {
  if (!world.job->is_coordinator()) return nullptr;
  return std::make_unique<CoordinatorService>(world, options.fusion_bytes,
                                              options.cache_capacity, timeline);
}

std::unique_ptr<LeaderService> LeaderServiceOf(const EngineOptions& options,
                                               const World& world) {
  const bool leads = world.topology.is_leader() && !world.job->is_coordinator();
  if (!leads) return nullptr;
  return std::make_unique<LeaderService>(world, options.cache_capacity);
}

}  // namespace

Work::Work(const EngineOptions& options, const World& world,
           std::shared_ptr<GpuAccess> gpu, Waiter* waiter, Requests* requests,
           SpinPolicy* spin_policy, Timeline* timeline, EngineCounters* counters)
    : job_(world.job),
      requests_(*requests),
      coordinator_service_(CoordinatorServiceOf(options, world, timeline)),
      leader_service_(LeaderServiceOf(options, world)),
      execution_(options, world, std::move(gpu), waiter, requests, spin_policy,
                 timeline, counters),
      stall_watch_(options, world, requests, coordinator_service_.get(),
                   leader_service_.get(), &execution_) {
  execution_.gpu().set_before_abort([this] {
    Try([this] {
      EndRequests();
      return true;
    });
  });
  if (coordinator_service_ == nullptr) return;
  // Before the first decision, which the others read before this setting.
  job_->set_compares_outputs(options.check);
  if (!options.autotune.on || job_->size() == 1) return;
  AutotuneOptions autotune = options.autotune;
  autotune.tunes_spin = options.cores >= world.topology.local_size();
  autotune.most_window_bytes = execution_.window_bytes();
  autotune.hosts = world.topology.hosts();
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

template <typename Step>
bool Work::Try(const Step& step) {
  try {
    return step();
  } catch (const std::exception& error) {
    job_->Fail(Code::kInternal, job_->Describe(job_->rank()) +
                                    " cannot go on: " + StatusOf(error).message);
    return true;
  }
}

bool Work::Poll() {
  return Try([this] { return PollOnce(); });
}

bool Work::RunNext() {
  return Try([this] { return RunOne(); });
}

bool Work::PollHosts() {
  return Try([this] { return job_->Poll(); });
}

bool Work::PollOnce() {
  // Other hosts hear of a failure from here, so this goes on after it.
  bool progressed = job_->Poll();
  if (has_ended_) {
    // By now this rank may be the one to report.
    ReportFailureOnce(job_.get());
    return progressed;
  }
  progressed |= requests_.Flush();
  if (coordinator_service_ != nullptr) progressed |= coordinator_service_->Poll();
  if (leader_service_ != nullptr) progressed |= leader_service_->Poll();
  progressed |= execution_.Read();
  stall_watch_.Check();
  execution_.gpu().Check();
  CheckDepartedAbove();
  return progressed;
}

bool Work::RunOne() {
  if (std::exchange(must_abort_, false)) {
    execution_.gpu().Abort();
    return true;
  }
  if (has_ended_) return false;
  if (job_->Failed()) {
    HandleFailure();
    return true;
  }
  if (!execution_.anything_to_do()) return false;
  execution_.CarryOutNext();
  return true;
}

// Nothing can be decided, or passed on merged, without a leader's own submission. Hence
// it sleeps through those of its host while it has none under way, unless some process
// set does not contain it.
uint32_t Work::Listening() const {
  const bool matters = execution_.some_go_without() || requests_.any_pending();
  return Doorbell::kNews | (matters ? Doorbell::kSubmission : 0);
}

bool Work::HasNews(uint32_t listening) {
  if (has_ended_) return must_abort_;
  if (job_->Failed() || execution_.HasNews()) return true;
  const bool listens = (listening & Doorbell::kSubmission) != 0;
  if (coordinator_service_ != nullptr) {
    if (coordinator_service_->HasNews()) return true;
    if (listens && coordinator_service_->HasSubmissions()) return true;
  }
  if (leader_service_ != nullptr) {
    if (leader_service_->HasNews()) return true;
    if (listens && leader_service_->HasSubmissions()) return true;
  }
  return requests_.CanFlush();
}

// The abort is a step of its own: it may take seconds, and a caller that drives has got
// its answer and leaves it to the engine's thread.
void Work::HandleFailure() {
  has_ended_ = true;
  must_abort_ = true;
  EndRequests();
}

// Ends the requests that have not begun to run: the GPU does not use their memory, so
// no abort must come first. One rank reports for all, with each rank's last operations.
void Work::EndRequests() {
  ReportFailureOnce(job_.get());
  const Status reason = ReasonOfEnd(*job_);
  requests_.EndAll(reason.code, reason.message);
}

void Work::BeginToLeave() {
  if (job_->Failed()) return;
  execution_.gpu().Leave();
  // What other hosts have decided by now is passed on.
  PollHosts();
  // The GPU may not have ended.
  if (job_->Failed()) return;
  leaves_ = true;
  leaves_since_ = Clock::now();
  if (coordinator_service_ != nullptr) coordinator_service_->BeginToLeave();
  if (leader_service_ != nullptr) leader_service_->BeginToLeave();
}

bool Work::MustStay() {
  if (job_->Failed()) return false;
  const std::vector<int> behind = NeededBy();
  if (behind.empty()) return false;
  stall_watch_.CheckStay(behind.front(), leaves_since_);
  Poll();
  // Ranks that wait for this one only go on when it leaves.
  return execution_.CarryOutRest();
}

std::vector<int> Work::NeededBy() {
  if (coordinator_service_ != nullptr) return coordinator_service_->NeededBy();
  return leader_service_ != nullptr ? leader_service_->NeededBy() : std::vector<int>();
}

void Work::Leave() {
  if (!job_->Failed()) {
    if (coordinator_service_ != nullptr) coordinator_service_->Leave();
    if (leader_service_ != nullptr) leader_service_->Leave();
  }
  if (!job_->Failed()) return;
  execution_.gpu().Abort();
  job_->AwaitAllKnow();
  ReportFailureOnce(job_.get());
}

// Without the coordinator, or a leader on the way to it, nothing more is decided for
// this rank. Earlier decisions are carried out.
void Work::CheckDepartedAbove() {
  if (job_->is_coordinator() || execution_.anything_to_do()) return;
  if (leaves_ || job_->has_departed()) return;
  const int departed = job_->DepartedAbove();
  if (departed < 0 || execution_.HasNews()) return;
  if (!requests_.any_pending() || job_->Failed()) return;
  // It may have left because of the error that this rank would have heard.
  const std::string error = execution_.ErrorOf(departed);
  if (!error.empty()) {
    job_->Fail(Code::kRankFailed, error + ". After this error " +
                                      job_->Describe(departed) + " has left the job");
    return;
  }
  const std::string why =
      departed == JobState::kCoordinator
          ? "Rank 0 decides for all process sets"
          : "It has the connection of its host to the others, being its lowest rank";
  job_->Fail(Code::kRankFailed, job_->Describe(departed) +
                                    " has left the job: " + job_->HowItLeft(departed) +
                                    ", while others still needed it. " + why);
}

}  // namespace keras_hvd
