#include "tf_ops/engine/engine_loop.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "tf_ops/collectives/processor.h"
#include "tf_ops/engine/job_failure.h"
#include "tf_ops/transport/threads.h"

namespace keras_hvd {

// How long a caller spins for its turn to drive, if each rank has a core. A futex round
// trip takes about as long. More would only take time from the training. The spin for a
// peer known to be ready is the same, unless tuned.
constexpr std::chrono::microseconds kSpin(50);
// With fewer cores than ranks: how often, and for how long, a rank yields before it
// sleeps. Ranks that use up their time slices would make the yielding last long, and
// may keep a killed rank from being noticed.
constexpr int kYields = 100;
constexpr std::chrono::microseconds kLongestYields(1000);
// The time between checks for events that do not ring, after as many yields.
constexpr std::chrono::microseconds kPause(50);
// A rank that waits for events that do not ring sleeps for this part of the time that
// it has waited, up to this.
constexpr int kNapPart = 16;
constexpr std::chrono::microseconds kLongestNap(1000);
// How long a rank that shuts down waits for the peers of a running batch.
constexpr std::chrono::seconds kShutdownPatience(5);

EngineLoop::EngineLoop(const EngineOptions& options, const World& world,
                       std::shared_ptr<GpuAccess> gpu, Requests* requests,
                       Timeline* timeline, EngineCounters* counters)
    : has_cores_(options.cores >= world.topology.local_size()),
      leads_(world.topology.is_leader()),
      job_(world.job),
      bell_(job_->bell()),
      link_watch_(world.link_watch),
      requests_(*requests),
      counters_(*counters),
      work_(options, world, std::move(gpu), this, requests, &spin_policy_, timeline,
            counters) {
  thread_ = StartThread("keras_hvd", [this] { Loop(); });
}

EngineLoop::~EngineLoop() { Stop(); }

void EngineLoop::Stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true);
  bell_.Ring();
  thread_.join();
}

// ---- The engine's thread

void EngineLoop::Loop() {
  std::unique_lock<std::mutex> driving(driving_);
  while (true) {
    const bool progressed = work_.Poll();
    if (work_.RunNext()) continue;
    if (stopping_.load()) break;
    if (callers_.load() > 0) {
      GiveWay(&driving);
    } else if (!progressed && !SpinForNews()) {
      Rest(&driving);
    }
  }
  Leave();
}

void EngineLoop::Leave() {
  work_.BeginToLeave();
  const Clock::time_point since = Clock::now();
  while (work_.MustStay()) Nap([] { return false; }, since);
  work_.Leave();
  requests_.EndAll(Code::kShutDown, kShutDownHere);
  // The peers have all decisions that were made, so they may now learn that this rank
  // has gone.
  job_->ShutDown();
}

// Within a moment a caller takes over, or already has its result.
void EngineLoop::GiveWay(std::unique_lock<std::mutex>* driving) {
  driving->unlock();
  SpinUntil([this] { return callers_.load() == 0; }, kSpin);
  driving->lock();
}

// ---- Callers

void EngineLoop::Ring() {
  job_->RingLeader(leads_ ? Doorbell::kEverything : Doorbell::kSubmission);
  // Wakes this rank's engine if it will have work at once, or if nobody decides any
  // more or watches whether anyone does.
  if (!leads_ &&
      (spin_policy_.prompt() || resting_.load() || job_->DepartedAbove() >= 0)) {
    bell_.Ring();
  }
}

void EngineLoop::DriveIfFree(const std::atomic<bool>& ended) {
  std::unique_lock<std::mutex> driving(driving_, std::try_to_lock);
  DriveOrRing(&driving, ended, true);
}

void EngineLoop::DriveSoon(const std::atomic<bool>& ended) {
  std::unique_lock<std::mutex> driving(driving_, std::defer_lock);
  callers_ += 1;
  // Only until the end: the driving thread may wait for this thread's next step.
  SpinUntil([&] { return ended.load() || driving.try_lock(); }, kSpin);
  callers_ -= 1;
  DriveOrRing(&driving, ended, false);
}

void EngineLoop::DriveOrRing(std::unique_lock<std::mutex>* driving,
                             const std::atomic<bool>& ended, bool has_other_work) {
  if (!driving->owns_lock()) return Ring();
  if (!leads_) job_->RingLeader(Doorbell::kSubmission);
  Drive(ended, has_other_work);
  driving->unlock();
}

// Drives in place of the engine's thread while there is something to do, or soon may
// be. Leaves the rest to that thread.
void EngineLoop::Drive(const std::atomic<bool>& ended, bool has_other_work) {
  // The engine's thread sleeps on: nobody needs to wake it while this thread looks.
  Cancel();
  while (!ended.load(std::memory_order_relaxed) && !stopping_.load()) {
    const bool progressed = work_.Poll();
    // All that was decided by now was pending. A single pending request is the
    // caller's.
    if (has_other_work && requests_.several_pending()) break;
    if (!work_.RunNext() && !progressed && !SpinForNews()) break;
  }
  LeaveDriving();
}

// Takes in news itself if that is all there is to do. Waking the engine's thread would
// cost more, and this thread may be back at once.
void EngineLoop::LeaveDriving() {
  Announce(work_.Listening());
  if (work_.PollHosts() || work_.HasNews(work_.Listening())) {
    Cancel();
    work_.Poll();
    Announce(work_.Listening());
  }
  // It does not wake for news that it did not listen to when it fell asleep.
  const bool hears_all = (work_.Listening() & ~rests_listening_to_) == 0;
  // Ring after announcing: the engine's thread may have slept since before that.
  if (!hears_all || work_.PollHosts() || requests_.any_pending() ||
      work_.HasNews(work_.Listening()) || work_.HasDecision() || stopping_.load()) {
    bell_.Ring();
  }
}

// ---- Waiting inside a collective

bool EngineLoop::Wait(const Ready& ready, int awaited) {
  return Await(ready, awaited, true);
}

bool EngineLoop::Poll(const Ready& ready, int awaited) {
  return Await(ready, awaited, false);
}

bool EngineLoop::Await(const Ready& ready, int awaited, bool is_rung) {
  const std::chrono::microseconds spin(work_.execution().tuning().spin_microseconds);
  if (SpinUntil(ready, spin)) return true;
  const Clock::time_point since = Clock::now();
  Clock::time_point stop_at = Clock::time_point::max();
  while (true) {
    work_.Poll();
    if (ready()) return true;
    if (job_->Failed()) return false;
    if (job_->HasShutDown(awaited) && !ready()) {
      job_->Fail(Code::kRankFailed, job_->Describe(awaited) +
                                        " left the job in the middle of " +
                                        work_.execution().running());
      return false;
    }
    const bool stopping = stopping_.load();
    if (stopping && stop_at == Clock::time_point::max()) {
      stop_at = Clock::now() + kShutdownPatience;
    }
    if (Clock::now() >= stop_at) return false;
    work_.stall_watch().CheckPeer(awaited, since);
    if (is_rung) {
      SleepInCollective(ready, stopping);
    } else {
      Nap(ready, since);
    }
  }
}

// For events that ring for nobody. It yields for a moment, and then sleeps for a part
// of the time that the wait has taken already.
void EngineLoop::Nap(const Ready& ready, Clock::time_point since) {
  const Clock::time_point now = Clock::now();
  if (now - since < kLongestYields) {
    sched_yield();
    return;
  }
  Announce();
  if (!work_.PollHosts() && !ready() && !work_.HasNews()) {
    counters_.sleeps += 1;
    bell_.Sleep(now + std::min<Clock::duration>((now - since) / kNapPart, kLongestNap));
  }
  Cancel();
}

// No other thread may continue the collective. `stopping` is the stop request as the
// caller has seen it and acted on it.
void EngineLoop::SleepInCollective(const Ready& ready, bool stopping) {
  const auto due = [&] { return ready() || work_.HasNews(); };
  Announce();
  if (work_.PollHosts() || due() || stopping_.load() != stopping) return Cancel();
  counters_.sleeps += 1;
  const bool rung = bell_.Sleep(Clock::now() + StallWatch::kInterval);
  if (!rung) CheckForLostWake(Doorbell::kEverything, due);
  Cancel();
}

bool EngineLoop::Pause(int64_t times) {
  work_.Poll();
  if (job_->Failed()) return false;
  if (stopping_.load() && stop_at_ == Clock::time_point::max()) {
    stop_at_ = Clock::now() + kShutdownPatience;
  }
  if (Clock::now() >= stop_at_) return false;
  if (times < kYields) {
    sched_yield();
    return true;
  }
  // Poll handles whatever wakes it.
  Announce();
  if (!work_.PollHosts() && !work_.HasNews()) bell_.Sleep(Clock::now() + kPause);
  Cancel();
  return true;
}

// ---- Waiting outside a collective

// Spins if decisions come soon; see spin_policy.h.
bool EngineLoop::SpinForNews() {
  if (!requests_.any_pending()) return false;
  spin_policy_.NoteWait();
  if (!spin_policy_.prompt()) return false;
  const auto due = [this] {
    return work_.PollHosts() || work_.HasNews() || callers_.load() > 0;
  };
  if (SpinUntil(due, SpinPolicy::kSpin)) return true;
  spin_policy_.NoteLate();
  return false;
}

// Sleeps until there is something to do. It wakes up by itself, to look for stalls,
// only while something waits: an idle engine uses no time. It rests, so the next
// submission must wake it, only after a while without any: in a loop of collectives
// each would pay for a wake.
//
// Everything that a ring may announce is checked after the announcement.
void EngineLoop::Rest(std::unique_lock<std::mutex>* driving) {
  const uint32_t listening = work_.Listening();
  Announce(listening);
  resting_.store(was_idle_);
  const bool watchful = !was_idle_ || work_.AnythingWaits();
  if (watchful) resting_.store(false);
  // A ring of a kind that this did not yet listen to was missed.
  const bool listens = listening == work_.Listening();
  if (!listens || work_.PollHosts() || work_.HasNews(listening) || stopping_.load()) {
    return Cancel();
  }
  counters_.sleeps += 1;
  rests_listening_to_ = listening;
  Clock::time_point deadline = job_->NextPoll();
  if (watchful && !work_.has_ended()) {
    deadline = std::min(deadline, Clock::now() + StallWatch::kInterval);
  }
  driving->unlock();
  const bool rung = bell_.Sleep(deadline, listening);
  // If a caller drives meanwhile, the news may be its own.
  const bool alone = driving->try_lock();
  if (!alone) driving->lock();
  was_idle_ = !rung;
  if (link_watch_ != nullptr) link_watch_->Disarm();
  if (rung || !alone) return;
  CheckForLostWake(listening, [this] { return work_.HasNews(work_.Listening()); });
  Cancel();
}

// ---- Both

// Events on a connection must wake it as well, unless it sees them before it sleeps.
void EngineLoop::Announce(uint32_t listening) {
  bell_.Announce(listening);
  if (link_watch_ != nullptr) link_watch_->Arm();
}

void EngineLoop::Cancel() {
  bell_.Cancel();
  if (link_watch_ != nullptr) link_watch_->Disarm();
}

// Yields to others instead if not all ranks have a core.
bool EngineLoop::SpinUntil(const Ready& ready, Clock::duration spin) const {
  if (!has_cores_) {
    const Clock::time_point end = Clock::now() + kLongestYields;
    for (int i = 0; i < kYields; ++i) {
      if (ready()) return true;
      sched_yield();
      if (Clock::now() > end) break;
    }
    return ready();
  }
  const Clock::time_point end = Clock::now() + spin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      SpinPause();
    }
  } while (Clock::now() < end);
  return ready();
}

// For a sleep that no ring has ended. The rank that published the news may have been
// delayed before ringing, but must ring in the end.
void EngineLoop::CheckForLostWake(uint32_t listening, const Ready& has_news) {
  if (!has_news()) return;
  if (bell_.Sleep(Clock::now() + StallWatch::kInterval, listening)) return;
  // A submission that finds no room is news for a moment before it is announced, and
  // nobody rings for that.
  if (!has_news()) return;
  counters_.lost_wakes += 1;
}

}  // namespace keras_hvd
