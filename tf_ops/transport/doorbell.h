// How a sleeping engine is woken: one futex word for each rank, in shared memory.
//
// Whoever publishes something for a rank (data, a submission, a decision, a death)
// stores it first and rings afterwards; the sleeper announces itself first and looks
// again before it sleeps. One of the two always sees the other, so no wake is lost.
#ifndef KERAS_HVD_TF_OPS_TRANSPORT_DOORBELL_H_
#define KERAS_HVD_TF_OPS_TRANSPORT_DOORBELL_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace keras_hvd {

using Clock = std::chrono::steady_clock;

class alignas(64) Doorbell {
 public:
  // Wakes the sleeper, if there is one. Cheap when there is none.
  void Ring();

  // Announces that the owner is about to sleep. What it waits for must be looked at
  // again between Announce and Sleep.
  void Announce();
  // Takes the announcement back.
  void Cancel();
  // Sleeps until somebody rings, or until `deadline`. Returns false on the deadline.
  bool Sleep(Clock::time_point deadline);

 private:
  // 1 while the owner sleeps or is about to. The ringer takes it down, so that a ring
  // between Announce and Sleep is seen by the kernel's own comparison.
  std::atomic<uint32_t> asleep_;
};

// Waits until `*word` is no longer `expected`, a wake, or the deadline (false).
bool FutexWait(std::atomic<uint32_t>* word, uint32_t expected,
               Clock::time_point deadline);
void FutexWake(std::atomic<uint32_t>* word);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_TRANSPORT_DOORBELL_H_
