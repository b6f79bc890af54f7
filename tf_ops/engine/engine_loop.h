// Who does an engine's work, and how it passes the time where there is none.
//
// One thread at a time drives an engine: its own, or a caller that would only wait
// otherwise, which saves two changes of thread. Callers come first. Who drives spins
// for a moment where that is worth it, and sleeps else, until somebody rings.
#ifndef KERAS_HVD_TF_OPS_ENGINE_ENGINE_LOOP_H_
#define KERAS_HVD_TF_OPS_ENGINE_ENGINE_LOOP_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "tf_ops/backend/world.h"
#include "tf_ops/collectives/communicator.h"
#include "tf_ops/engine/engine_counters.h"
#include "tf_ops/engine/engine_options.h"
#include "tf_ops/engine/requests.h"
#include "tf_ops/engine/spin_policy.h"
#include "tf_ops/engine/work.h"
#include "tf_ops/timeline/timeline.h"

namespace keras_hvd {

class EngineLoop : private Waiter {
 public:
  // Starts the engine's thread.
  EngineLoop(const EngineOptions& options, const World& world,
             std::shared_ptr<GpuAccess> gpu, Requests* requests, Timeline* timeline,
             EngineCounters* counters);
  ~EngineLoop() override;
  EngineLoop(const EngineLoop&) = delete;
  EngineLoop& operator=(const EngineLoop&) = delete;

  // Ends the engine's thread, and with it this rank's part in the job: what is running
  // is finished, what is waiting ends with kShutDown.
  void Stop();

  // Each of these, for a request that was just submitted, has somebody see to it.
  //
  // Wakes who has to.
  void Ring();
  // The calling thread, which has other work as well, drives if no other does, until
  // the request has ended, nothing is expected soon, or others are under way: what they
  // wait for, and how long they take, is none of its concern.
  void DriveIfFree(const std::atomic<bool>& ended);
  // The calling thread, which waits for the end, drives until then, or until nothing is
  // expected soon. It waits for a moment for its turn.
  void DriveSoon(const std::atomic<bool>& ended);

 private:
  using Ready = std::function<bool()>;

  void Loop();
  void Leave();
  void DriveOrRing(std::unique_lock<std::mutex>* driving,
                   const std::atomic<bool>& ended, bool has_other_work);
  void Drive(const std::atomic<bool>& ended, bool has_other_work);
  void LeaveDriving();
  void GiveWay(std::unique_lock<std::mutex>* driving);

  // Inside of a collective.
  bool Wait(const Ready& ready, int awaited) override;
  bool Pause(int64_t times) override;
  void SleepInCollective(const Ready& ready, bool stopping);
  // Outside of one.
  bool SpinForNews();
  void Rest(std::unique_lock<std::mutex>* driving);

  bool SpinUntil(const Ready& ready, Clock::duration spin) const;
  void CheckForLostWake(uint32_t listening, const Ready& has_news);

  const bool has_cores_;  // for all ranks of this host
  const std::shared_ptr<JobState> job_;
  Doorbell& bell_;
  Requests& requests_;
  EngineCounters& counters_;
  SpinPolicy spin_policy_;

  // Held by who drives, but not while it rests.
  std::mutex driving_;
  Work work_;                                             // guarded by driving_
  Clock::time_point stop_at_ = Clock::time_point::max();  // guarded by driving_
  bool was_idle_ = false;  // the last sleep ended without a ring; guarded by driving_

  std::atomic<int> callers_{0};  // that want to drive
  std::atomic<bool> stopping_{false};
  std::atomic<bool> resting_{false};  // asleep until somebody rings, stalls or not
  std::thread thread_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_ENGINE_ENGINE_LOOP_H_
