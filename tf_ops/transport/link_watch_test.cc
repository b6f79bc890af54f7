// LinkWatch: while armed, rings for bytes that come.
#include "tf_ops/transport/link_watch.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

namespace keras_hvd {
namespace {

constexpr std::chrono::seconds kForever(60);
// Long enough for a ring that must not come.
constexpr std::chrono::milliseconds kMoment(50);

class LinkWatchTest : public testing::Test {
 protected:
  LinkWatchTest() { EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends_), 0); }
  ~LinkWatchTest() override {
    for (int end : ends_) close(end);
  }

  void Send() { EXPECT_EQ(write(ends_[1], "x", 1), 1); }
  bool Sleeps(Clock::duration time) { return bell_.Sleep(Clock::now() + time); }

  int ends_[2];
  Doorbell bell_{};
};

TEST_F(LinkWatchTest, RingsForWhatComesLater) {
  LinkWatch watch({ends_[0]}, {}, &bell_, [] {});
  for (int i = 0; i < 3; ++i) {
    bell_.Announce();
    watch.Arm();
    Send();
    EXPECT_TRUE(Sleeps(kForever));
  }
}

TEST_F(LinkWatchTest, DoesNotRingForWhatCameBefore) {
  LinkWatch watch({ends_[0]}, {}, &bell_, [] {});
  Send();
  bell_.Announce();
  watch.Arm();
  EXPECT_FALSE(Sleeps(kMoment));
  Send();
  EXPECT_TRUE(Sleeps(kForever));
}

TEST_F(LinkWatchTest, DoesNotRingWhileDisarmed) {
  LinkWatch watch({ends_[0]}, {}, &bell_, [] {});
  bell_.Announce();
  watch.Arm();
  watch.Disarm();
  Send();
  EXPECT_FALSE(Sleeps(kMoment));
}

TEST_F(LinkWatchTest, SaysIfItCannotWatch) {
  EXPECT_TRUE(LinkWatch({ends_[0], ends_[1]}, {}, &bell_, [] {}).status().ok());
  const LinkWatch watch({ends_[0], -1}, {}, &bell_, [] {});
  EXPECT_NE(watch.status().message.find("Bad file descriptor"), std::string::npos);
}

TEST_F(LinkWatchTest, RingsForAnEnd) {
  LinkWatch watch({ends_[0]}, {}, &bell_, [] {});
  bell_.Announce();
  watch.Arm();
  shutdown(ends_[1], SHUT_RDWR);
  EXPECT_TRUE(Sleeps(kForever));
}

}  // namespace
}  // namespace keras_hvd
