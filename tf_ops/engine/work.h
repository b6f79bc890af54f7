// An engine's work, in steps that the driving thread takes one after the other.
#pragma once

#include <cstdint>
#include <memory>

#include "tf_ops/backend/world.h"
#include "tf_ops/collectives/communicator.h"
#include "tf_ops/engine/coordinator_service.h"
#include "tf_ops/engine/engine_counters.h"
#include "tf_ops/engine/engine_options.h"
#include "tf_ops/engine/execution.h"
#include "tf_ops/engine/leader_service.h"
#include "tf_ops/engine/requests.h"
#include "tf_ops/engine/spin_policy.h"
#include "tf_ops/engine/stall_watch.h"
#include "tf_ops/timeline/timeline.h"

namespace keras_hvd {

// Only the driving thread uses this class. An exception in a step (no memory) fails the
// job and leaves none: the thread may be a caller's, and the peers count on this rank.
class Work {
 public:
  // `waiter` passes the time inside collectives.
  Work(const EngineOptions& options, const World& world, std::shared_ptr<GpuAccess> gpu,
       Waiter* waiter, Requests* requests, SpinPolicy* spin_policy, Timeline* timeline,
       EngineCounters* counters);

  // Does all that can be done without waiting. A running collective may have to wait.
  // Returns true if there was anything.
  bool Poll();
  // Carries out a decision, or handles the job's failure. Returns false if there is
  // neither.
  bool RunNext();

  // The kinds of rings that wake an engine outside a collective; see doorbell.h.
  uint32_t Listening() const;
  // Whether Poll or RunNext would find something to do, among the news of `listening`.
  bool HasNews(uint32_t listening = Doorbell::kEverything);
  // Whether a decision was read but not carried out.
  bool HasDecision() const { return execution_.anything_to_do(); }
  // Whether someone must look for stalls from time to time.
  bool AnythingWaits() const {
    return requests_.any_pending() || execution_.gpu().anything_under_way() ||
           (coordinator_service_ != nullptr &&
            coordinator_service_->anything_waits()) ||
           (leader_service_ != nullptr && leader_service_->anything_waits());
  }
  // Exchanges news with other hosts. Returns true if there was any.
  bool PollHosts();
  // Whether the job has failed, and all requests that had not begun to run have ended.
  bool has_ended() const { return has_ended_; }

  // Waits for the work still running, at the end of this rank's part in the job.
  void BeginToLeave();
  // Whether this rank still has to poll for those below it.
  bool MustStay();
  void Leave();

  StallWatch& stall_watch() { return stall_watch_; }
  const Execution& execution() const { return execution_; }

 private:
  template <typename Step>
  bool Try(const Step& step);
  bool PollOnce();
  bool RunOne();
  void HandleFailure();
  void EndRequests();
  std::vector<int> NeededBy();
  void CheckDepartedAbove();

  const std::shared_ptr<JobState> job_;
  Requests& requests_;
  const std::unique_ptr<CoordinatorService> coordinator_service_;  // on the coordinator
  const std::unique_ptr<LeaderService> leader_service_;            // on other leaders
  Execution execution_;
  StallWatch stall_watch_;
  bool has_ended_ = false;
  bool must_abort_ = false;  // then, the work under way on the GPU
  bool leaves_ = false;
  Clock::time_point leaves_since_;
};

}  // namespace keras_hvd
