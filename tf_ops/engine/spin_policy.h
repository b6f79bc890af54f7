// Learns whether decisions come soon enough that spinning for the next one pays off.
//
// Outside a collective nobody knows when the peers will be ready. A rank spins for them
// if they were this quick the last time: in a loop of collectives, but not in a
// training whose ranks end their steps at different times.
#pragma once

#include <atomic>
#include <chrono>
#include <utility>

#include "tf_ops/transport/doorbell.h"

namespace keras_hvd {

class SpinPolicy {
 public:
  // How long to spin for a peer that is expected: ranks that do the same work in
  // TensorFlow between two collectives finish about this far apart.
  static constexpr std::chrono::microseconds kSpin{200};

  // Any thread.
  bool prompt() const { return prompt_.load(std::memory_order_relaxed); }

  // For the driving thread only: it waits for a decision, gets one, or spun in vain.
  void NoteWait() {
    if (waiting_since_ == Clock::time_point::max()) waiting_since_ = Clock::now();
  }
  // A rank that slept has waited for its wake as well.
  void NoteDecision() {
    const Clock::time_point since =
        std::exchange(waiting_since_, Clock::time_point::max());
    const Clock::duration soon = prompt() ? kSpin : kWake;
    prompt_.store(since == Clock::time_point::max() || Clock::now() - since < soon);
  }
  void NoteLate() { prompt_.store(false); }

 private:
  // A decision this soon, a rank's wake included, makes the next spin worthwhile.
  static constexpr std::chrono::microseconds kWake{150};

  Clock::time_point waiting_since_ = Clock::time_point::max();
  std::atomic<bool> prompt_{false};
};

}  // namespace keras_hvd
