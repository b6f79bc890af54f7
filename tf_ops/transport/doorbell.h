// How a sleeping engine is woken: one futex word for each rank, in shared memory.
//
// Whoever publishes something for a rank (data, a submission, a decision, a death)
// stores it first and rings afterwards; the sleeper announces itself first and looks
// again before it sleeps. One of the two always sees the other, so no wake is lost. A
// ring says what it is about, and a sleeper what it listens to, for a wake costs more
// than most of what is rung about.
#ifndef KERAS_HVD_TF_OPS_TRANSPORT_DOORBELL_H_
#define KERAS_HVD_TF_OPS_TRANSPORT_DOORBELL_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace keras_hvd {

using Clock = std::chrono::steady_clock;

class alignas(64) Doorbell {
 public:
  // What a ring may be about; a sleeper listens to a sum of these.
  static constexpr uint32_t kProgress = 1;    // of a collective
  static constexpr uint32_t kSubmission = 2;  // there is one to be read
  static constexpr uint32_t kNews = 4;        // decisions, failures, departures
  static constexpr uint32_t kEverything = 7;

  // Wakes the sleeper, if there is one that listens. Cheap when there is none.
  void Ring(uint32_t about = kEverything);

  // Wakes the sleeper, whatever it listens to, and even if somebody who died over it
  // had begun to ring.
  void Wake();

  // Announces that the owner is about to sleep. What it listens to must be looked at
  // again between Announce and Sleep.
  void Announce(uint32_t listening = kEverything);
  // Takes the announcement back.
  void Cancel();
  // Sleeps until somebody rings, or until `deadline`. Returns false on the deadline;
  // the announcement then still stands.
  bool Sleep(Clock::time_point deadline, uint32_t listening = kEverything);

 private:
  // What the owner listens to while it sleeps or is about to. The ringer takes down
  // what it rings about, so that a ring between Announce and Sleep is seen by the
  // kernel's own comparison.
  std::atomic<uint32_t> listening_;
};

// Waits until `*word` is no longer `expected`, a wake, or the deadline (false).
bool FutexWait(std::atomic<uint32_t>* word, uint32_t expected,
               Clock::time_point deadline);
void FutexWake(std::atomic<uint32_t>* word);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_TRANSPORT_DOORBELL_H_
