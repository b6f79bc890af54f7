// See peer_clock.h.
#include "tf_ops/transport/peer_clock.h"

#include <algorithm>

namespace keras_hvd {

Clock::time_point PeerClock::Note(Clock::time_point sent, Clock::time_point read,
                                  std::chrono::nanoseconds delay) {
  Clock::duration ahead = read - sent;
  if (ahead_.has_value()) {
    ahead = std::min(ahead, *ahead_ + (read - noted_) / kMostDrift);
  }
  ahead_ = ahead;
  noted_ = read;
  return sent + ahead - delay;
}

}  // namespace keras_hvd
