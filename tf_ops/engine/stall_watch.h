// Watches for requests that wait too long for ranks, and for ranks that do not answer.
// Warns, and ends the job if that was requested.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "tf_ops/engine/coordinator_service.h"
#include "tf_ops/engine/engine_options.h"
#include "tf_ops/engine/execution.h"
#include "tf_ops/engine/leader_service.h"
#include "tf_ops/engine/requests.h"
#include "tf_ops/transport/job_state.h"

namespace keras_hvd {

// Only the driving thread uses this class.
class StallWatch {
 public:
  // How often to check waiting requests, while there are any.
  static constexpr std::chrono::milliseconds kInterval{500};

  // `coordinator_service`: the coordinator's, or null. `leader_service`: another
  // leader's, or null.
  StallWatch(const EngineOptions& options, const World& world, Requests* requests,
             CoordinatorService* coordinator_service, LeaderService* leader_service,
             const Execution* execution);

  // Checks the waiting requests if it is time.
  void Check() {
    const Clock::time_point now = Clock::now();
    if (now >= next_check_) CheckAt(now);
  }
  // Checks on a rank that this one has waited for since `since`.
  void CheckPeer(int awaited, Clock::time_point since);
  // Checks on a rank for which this one has stayed since `since`, though it leaves.
  void CheckStay(int awaited, Clock::time_point since);

 private:
  void CheckAt(Clock::time_point now);
  template <typename Text>
  void CheckWait(int awaited, Clock::time_point since, const Text& text);
  // How long to wait before this rank asks why: until the earlier of both limits.
  double PatienceSeconds() const;
  void CheckSilentLeader();
  void CheckSilentCoordinator();

  const double warning_seconds_;  // negative: never
  const double abort_seconds_;    // 0: never
  const std::shared_ptr<JobState> job_;
  Requests& requests_;
  const int leader_;  // of this rank's host
  const bool checks_coordinator_;
  CoordinatorService* const coordinator_service_;
  LeaderService* const leader_service_;
  const Execution& execution_;
  Clock::time_point next_check_;
  uint64_t reported_ = 0;  // sequence of the batch
};

}  // namespace keras_hvd
