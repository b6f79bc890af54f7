// The time by another host's clock, told by the messages that come from there.
//
// Each says when it was sent. The one that was on its way for the shortest time says
// best how far the clocks are apart: the others came late, or were read late.
#pragma once

#include <chrono>
#include <optional>

#include "tf_ops/transport/doorbell.h"

namespace keras_hvd {

class PeerClock {
 public:
  // The other clock may be faster or slower than this host's by one part in this many,
  // as one that is being set right.
  static constexpr int kMostDrift = 2000;
  // If no message was that early for this long, the other clock has stood still, as
  // that of a machine that was paused.
  static constexpr std::chrono::seconds kPatience{10};

  // Takes in a message: when it was sent by the other clock, and when it was read by
  // this one's. Returns when it was sent by this one's, if the shortest way takes
  // `delay`.
  Clock::time_point Note(Clock::time_point sent, Clock::time_point read,
                         std::chrono::nanoseconds delay);

 private:
  // This host's clock less the other one, plus the shortest way; and the least such
  // value since a message was as early.
  std::optional<Clock::duration> ahead_;
  Clock::duration least_ = Clock::duration::max();
  Clock::time_point noted_;  // when a message was noted last
  Clock::time_point early_;  // when one was as early
};

}  // namespace keras_hvd
