// PeerClock: messages that are read late say nothing wrong of another host's clock.
#include "tf_ops/transport/peer_clock.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>

namespace keras_hvd {
namespace {

using std::chrono::duration_cast;
using std::chrono::hours;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;

constexpr microseconds kDelay(100);  // of each message
constexpr hours kStart(100);         // by this host's clock

// Two hosts, of whose clocks this host's shows the true time.
class Hosts {
 public:
  explicit Hosts(nanoseconds apart, double drift) : apart_(apart), drift_(drift) {}

  Clock::time_point now() const { return Clock::time_point(kStart + passed_); }
  void Pass(nanoseconds time) { passed_ += time; }
  // The other one, with its clock.
  void PauseTheOther(nanoseconds time) {
    Pass(time);
    apart_ -= time;
  }
  // Sends a message that is read this late. Returns by how much the time is wrong.
  nanoseconds Send(nanoseconds late) {
    const Clock::time_point sent = now();
    const nanoseconds drifted(static_cast<int64_t>(drift_ * passed_.count()));
    const Clock::time_point theirs = sent + apart_ + drifted;
    Pass(kDelay + late);
    return clock_.Note(theirs, now(), kDelay) - sent;
  }

 private:
  nanoseconds apart_;
  const double drift_;
  nanoseconds passed_{0};
  PeerClock clock_;
};

TEST(PeerClockTest, TheFirstMessageCountsAsReadInTime) {
  Hosts hosts(hours(24), 0);
  EXPECT_EQ(hosts.Send(milliseconds(3)), milliseconds(3));
}

TEST(PeerClockTest, AMessageThatIsReadLateWasNotSentLate) {
  for (const nanoseconds apart : {nanoseconds(hours(24)), nanoseconds(-hours(24))}) {
    Hosts hosts(apart, 0);
    EXPECT_EQ(hosts.Send(nanoseconds(0)), nanoseconds(0));
    // The time that the other clock may have gained meanwhile.
    EXPECT_LT(hosts.Send(milliseconds(20)), microseconds(11));
    EXPECT_LT(hosts.Send(milliseconds(20)), microseconds(21));
    EXPECT_EQ(hosts.Send(nanoseconds(0)), nanoseconds(0));
  }
}

// One message in ten is read in time; the others are some milliseconds late.
TEST(PeerClockTest, AClockThatRunsFasterOrSlowerIsFollowed) {
  for (const double drift : {-4e-4, -2e-5, 0.0, 2e-5, 4e-4}) {
    Hosts hosts(hours(1), drift);
    std::mt19937 random(7);
    hosts.Send(nanoseconds(0));
    while (hosts.now() < Clock::time_point(kStart + seconds(60))) {
      hosts.Pass(microseconds(random() % 2000));
      const bool is_late = random() % 10 != 0;
      const nanoseconds late = is_late ? microseconds(random() % 5000) : nanoseconds(0);
      const nanoseconds error = hosts.Send(late);
      ASSERT_LT(std::max(error, -error), microseconds(300)) << drift;
    }
  }
}

TEST(PeerClockTest, AMachineThatWasPausedIsRightAgainAfterAWhile) {
  Hosts hosts(hours(1), 0);
  std::mt19937 random(7);
  hosts.Send(nanoseconds(0));
  hosts.PauseTheOther(seconds(3));
  const Clock::time_point until = hosts.now() + PeerClock::kPatience;
  nanoseconds error{0};
  while (hosts.now() < until + milliseconds(10)) {
    hosts.Pass(milliseconds(1));
    error = hosts.Send(microseconds(random() % 5000));
  }
  EXPECT_LT(std::max(error, -error), microseconds(300));
}

}  // namespace
}  // namespace keras_hvd
