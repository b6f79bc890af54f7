// Wakes a sleeping engine: one futex word for each rank, in shared memory.
//
// A rank that publishes something (data, a submission, a decision, a death) stores it
// first and rings afterwards. The sleeper announces itself first and looks again before
// it sleeps. One of the two always sees the other, so no wake is lost. A wake costs
// more than most of the events rung for, so a ring says what it is about and a sleeper
// says what it listens to.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace keras_hvd {

using Clock = std::chrono::steady_clock;

inline int64_t Nanoseconds(Clock::duration time) {
  return std::chrono::nanoseconds(time).count();
}
// By the clock that all processes of a host share.
inline int64_t NowNanoseconds() { return Nanoseconds(Clock::now().time_since_epoch()); }
inline double Seconds(Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

class alignas(64) Doorbell {
 public:
  // The subjects of rings. A sleeper listens to a sum of these.
  static constexpr uint32_t kProgress = 1;    // a collective has advanced
  static constexpr uint32_t kSubmission = 2;  // one can be read
  static constexpr uint32_t kNews = 4;        // decisions, failures, departures
  static constexpr uint32_t kEverything = 7;

  // Wakes the sleeper if it listens to this. Cheap if nobody does.
  void Ring(uint32_t about = kEverything);

  // Wakes the sleeper, whatever it listens to, even if another rank died while ringing.
  void Wake();

  // Announces that the owner is about to sleep. The owner must check again for the news
  // it listens to between Announce and Sleep.
  void Announce(uint32_t listening = kEverything);
  // Withdraws the announcement.
  void Cancel();
  // Sleeps until somebody rings, or until `deadline`. Returns false on the deadline.
  // The announcement then still stands.
  bool Sleep(Clock::time_point deadline, uint32_t listening = kEverything);

 private:
  // The news that the owner listens to while it sleeps or is about to. The ringer
  // clears the bits that it rings about, so the kernel's comparison notices a ring
  // between Announce and Sleep.
  std::atomic<uint32_t> listening_;
};

// Waits until `*word` differs from `expected`, a wake, or the deadline (returns false).
bool FutexWait(std::atomic<uint32_t>* word, uint32_t expected,
               Clock::time_point deadline);
void FutexWake(std::atomic<uint32_t>* word);

}  // namespace keras_hvd
