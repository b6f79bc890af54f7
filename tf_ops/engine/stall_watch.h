// Looks after what takes too long: requests that wait for ranks, and ranks that do not
// answer. It warns, and ends the job if that was asked for.
#ifndef KERAS_HVD_TF_OPS_ENGINE_STALL_WATCH_H_
#define KERAS_HVD_TF_OPS_ENGINE_STALL_WATCH_H_

#include <chrono>
#include <cstdint>
#include <memory>

#include "tf_ops/engine/coordinator_service.h"
#include "tf_ops/engine/engine_options.h"
#include "tf_ops/engine/execution.h"
#include "tf_ops/engine/requests.h"
#include "tf_ops/transport/job_state.h"

namespace keras_hvd {

// All of it is for who drives the engine.
class StallWatch {
 public:
  // How often waiting requests are looked at; only while there are any.
  static constexpr std::chrono::milliseconds kInterval{500};

  // `coordinator_service`: the coordinator's, or null.
  StallWatch(const EngineOptions& options, std::shared_ptr<JobState> job,
             Requests* requests, CoordinatorService* coordinator_service,
             const Execution* execution);

  // Looks at what waits, if it is time to.
  void Check() {
    const Clock::time_point now = Clock::now();
    if (now >= next_check_) CheckAt(now);
  }
  // Looks at a rank that this one waits for since `since`.
  void CheckPeer(int awaited, Clock::time_point since);

 private:
  void CheckAt(Clock::time_point now);
  void CheckSilentCoordinator();

  const double warning_seconds_;  // negative: never
  const double abort_seconds_;    // 0: never
  const std::shared_ptr<JobState> job_;
  Requests& requests_;
  CoordinatorService* const coordinator_service_;
  const Execution& execution_;
  Clock::time_point next_check_;
  uint64_t reported_ = 0;  // sequence of the batch
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_ENGINE_STALL_WATCH_H_
