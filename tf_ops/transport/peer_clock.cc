#include "tf_ops/transport/peer_clock.h"

#include <algorithm>

namespace keras_hvd {

Clock::time_point PeerClock::Note(Clock::time_point sent, Clock::time_point read,
                                  std::chrono::nanoseconds delay) {
  const Clock::duration ahead = read - sent;
  least_ = std::min(least_, ahead);
  if (ahead_.has_value()) *ahead_ += (read - noted_) / kMostDrift;
  noted_ = read;
  const bool is_early = !ahead_.has_value() || ahead <= *ahead_;
  if (is_early || read >= early_ + kPatience) {
    ahead_ = is_early ? ahead : least_;
    least_ = Clock::duration::max();
    early_ = read;
  }
  return sent + *ahead_ - delay;
}

}  // namespace keras_hvd
