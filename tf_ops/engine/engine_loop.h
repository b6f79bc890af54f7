// Determines the thread that does an engine's work, and passes the time when there is
// none.
//
// One thread at a time drives an engine: the engine's own, or a caller that would
// otherwise only wait, which saves two thread switches. Callers come first. The driving
// thread spins briefly if that is worthwhile, and otherwise sleeps until rung.
#pragma once

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
  // Starts the engine's thread. Raises std::system_error without room for it.
  EngineLoop(const EngineOptions& options, const World& world,
             std::shared_ptr<GpuAccess> gpu, Requests* requests, Timeline* timeline,
             EngineCounters* counters);
  ~EngineLoop() override;
  EngineLoop(const EngineLoop&) = delete;
  EngineLoop& operator=(const EngineLoop&) = delete;

  // Ends the engine's thread, and with it this rank's part in the job. A running batch
  // is finished; waiting requests end with kShutDown.
  void Stop();

  // Each of these makes sure that a thread handles a request that was just submitted.
  //
  // Wakes the engines that must handle it.
  void Ring();
  // The calling thread has other work too. It drives, if no other thread does, until
  // the request has ended, nothing is expected soon, or other requests are under way:
  // their waits do not concern it.
  void DriveIfFree(const std::atomic<bool>& ended);
  // The calling thread waits for the end. It drives until then, or until nothing is
  // expected soon, and waits a moment for its turn.
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

  // Inside a collective.
  bool Wait(const Ready& ready, int awaited) override;
  bool Poll(const Ready& ready, int awaited) override;
  bool Pause(int64_t times) override;
  bool Await(const Ready& ready, int awaited, bool is_rung);
  void SleepInCollective(const Ready& ready, bool stopping);
  // Outside a collective.
  bool SpinForNews();
  void Rest(std::unique_lock<std::mutex>* driving);

  void Nap(const Ready& ready, Clock::time_point since);
  void Announce(uint32_t listening = Doorbell::kEverything);
  void Cancel();
  bool SpinUntil(const Ready& ready, Clock::duration spin) const;
  void CheckForLostWake(uint32_t listening, const Ready& has_news);

  const bool has_cores_;  // one for each rank of this host
  const bool leads_;      // the ranks of this host
  const std::shared_ptr<JobState> job_;
  Doorbell& bell_;
  const std::shared_ptr<LinkWatch> link_watch_;  // null: there is no other host
  Requests& requests_;
  EngineCounters& counters_;
  SpinPolicy spin_policy_;

  // Held by the driving thread, except while it rests.
  std::mutex driving_;
  Work work_;                                             // guarded by driving_
  Clock::time_point stop_at_ = Clock::time_point::max();  // guarded by driving_
  // The news that its last sleep listened to; guarded by driving_.
  uint32_t rests_listening_to_ = 0;
  bool was_idle_ = false;  // the last sleep ended without a ring; guarded by driving_

  std::atomic<int> callers_{0};  // threads that want to drive
  std::atomic<bool> stopping_{false};
  std::atomic<bool> resting_{false};  // asleep until a ring, even if something stalls
  std::thread thread_;
};

}  // namespace keras_hvd
