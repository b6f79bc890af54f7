#include "tf_ops/engine/stall_watch.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "tf_ops/operation/log.h"

namespace keras_hvd {

StallWatch::StallWatch(const EngineOptions& options, const World& world,
                       Requests* requests, CoordinatorService* coordinator_service,
                       LeaderService* leader_service, const Execution* execution)
    : warning_seconds_(options.stall_warning_seconds),
      abort_seconds_(options.stall_abort_seconds),
      job_(world.job),
      requests_(*requests),
      leader_(world.topology.leader()),
      checks_coordinator_(world.topology.host() == 1 &&
                          world.topology.ranks_of(0).size() == 1),
      coordinator_service_(coordinator_service),
      leader_service_(leader_service),
      execution_(*execution) {}

double StallWatch::PatienceSeconds() const {
  constexpr double kForever = std::numeric_limits<double>::infinity();
  return std::min(warning_seconds_ < 0 ? kForever : warning_seconds_,
                  abort_seconds_ > 0 ? abort_seconds_ : kForever);
}

void StallWatch::CheckAt(Clock::time_point now) {
  next_check_ = now + kInterval;
  if (coordinator_service_ != nullptr) {
    return coordinator_service_->CheckStalls(warning_seconds_, abort_seconds_,
                                             PatienceSeconds());
  }
  if (leader_service_ != nullptr) {
    leader_service_->PassOnOld();
    return CheckSilentCoordinator();
  }
  // Without a request of its own the leader may not have read the submissions here.
  if (requests_.any_pending()) job_->RingLeader();
  CheckSilentLeader();
}

// The coordinator reports stalls, but not its own, nor those of a leader that passes
// nothing on. Another rank of the host checks on it.
void StallWatch::CheckSilentLeader() {
  if (!execution_.running().empty()) return;
  const Clock::time_point oldest = requests_.OldestPending();
  if (oldest == Clock::time_point::max()) return;
  const double waited = Seconds(Clock::now() - oldest);
  if (waited < PatienceSeconds()) return;
  if (job_->Obstacle(leader_).empty()) return;
  CheckPeer(leader_, oldest);
}

// If the coordinator is alone on its host, that of the next one checks on it.
void StallWatch::CheckSilentCoordinator() {
  if (!checks_coordinator_ || !execution_.running().empty()) return;
  const Clock::time_point oldest = requests_.OldestPending();
  if (oldest == Clock::time_point::max()) return;
  const double waited = Seconds(Clock::now() - oldest);
  if (waited >= PatienceSeconds() / 2) job_->AskForSigns();
  if (waited < PatienceSeconds() || !job_->IsSilent(JobState::kCoordinator)) return;
  CheckPeer(JobState::kCoordinator, oldest);
}

void StallWatch::CheckPeer(int awaited, Clock::time_point since) {
  CheckWait(awaited, since, [this](const std::string& seconds) {
    std::string text = " has not answered for " + seconds;
    const std::string& running = execution_.running();
    if (!running.empty()) text += " in " + running;
    return text;
  });
}

void StallWatch::CheckStay(int awaited, Clock::time_point since) {
  CheckWait(awaited, since, [this](const std::string& seconds) {
    return ", or a rank that it leads, has not started for " + seconds +
           " what was decided, for which others may wait on their GPUs. Rank " +
           std::to_string(job_->rank()) +
           ", which leaves the job, stays until they have, or have left";
  });
}

// `text(seconds)`: the words after the rank's name.
template <typename Text>
void StallWatch::CheckWait(int awaited, Clock::time_point since, const Text& text) {
  const double waited = Seconds(Clock::now() - since);
  if (waited >= PatienceSeconds() / 2) job_->AskForSigns();
  const auto report = [&] {
    return job_->Describe(awaited) +
           text(std::to_string(static_cast<int>(waited)) + " s") +
           job_->Obstacle(awaited);
  };
  if (abort_seconds_ > 0 && waited >= abort_seconds_) {
    job_->Fail(Code::kRankFailed,
               report() + ". The job was ended by KERAS_HVD_STALL_ABORT_SECONDS");
    return;
  }
  if (warning_seconds_ < 0 || waited < warning_seconds_) return;
  // One warning per batch for all ranks, which agree on batch numbers. Disjoint sets
  // may stall in different batches at the same time, so each rank also keeps its own
  // note.
  const uint64_t stalled = execution_.sequence() + 1;
  if (std::exchange(reported_, stalled) == stalled) return;
  if (!job_->ClaimStallReport(stalled)) return;
  Log(job_->rank(), LogLevel::kWarning, report());
}

}  // namespace keras_hvd
