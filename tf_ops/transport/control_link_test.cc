// ControlLink: frames of any length, complete and in order.
#include "tf_ops/transport/control_link.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tf_ops/transport/tls_testing.h"

namespace keras_hvd {
namespace {

constexpr std::chrono::seconds kForever(60);

// In the clear, or over TLS.
class ControlLinkTest : public testing::TestWithParam<bool> {
 protected:
  ControlLinkTest() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    TlsEnds tls;
    if (GetParam()) tls = ShakeHands(ends[0], ends[1]);
    a_ = std::make_unique<ControlLink>(ends[0], 1, std::move(tls.client));
    b_ = std::make_unique<ControlLink>(ends[1], 0, std::move(tls.server));
  }

  // Moves everything from a_ to b_.
  std::vector<std::string> Deliver() {
    std::vector<std::string> frames;
    bool moved = true;
    while (moved) {
      moved = a_->Flush();
      moved |= b_->Receive();
      FrameType type;
      std::string_view bytes;
      while (b_->Next(&type, &bytes)) frames.emplace_back(bytes);
    }
    return frames;
  }

  std::unique_ptr<ControlLink> a_, b_;
};

INSTANTIATE_TEST_SUITE_P(, ControlLinkTest, testing::Bool(), [](const auto& tls) {
  return tls.param ? "OverTls" : "InTheClear";
});

TEST_P(ControlLinkTest, FramesComeWholeAndInOrder) {
  std::vector<std::string> sent;
  for (size_t bytes : {0, 1, 7, 100000, 3, 5 << 20, 0}) {
    sent.push_back(std::string(bytes, static_cast<char>('a' + sent.size())));
    a_->Queue(FrameType::kDecision, sent.back());
  }
  EXPECT_EQ(Deliver(), sent);
  EXPECT_EQ(b_->why_closed(), "");
}

TEST_P(ControlLinkTest, TypesTravel) {
  a_->Queue(FrameType::kDeparture, "who");
  a_->Flush();
  EXPECT_TRUE(b_->Receive());
  FrameType type;
  std::string_view bytes;
  ASSERT_TRUE(b_->Next(&type, &bytes));
  EXPECT_EQ(type, FrameType::kDeparture);
  EXPECT_FALSE(b_->Next(&type, &bytes));
}

TEST_P(ControlLinkTest, WhatTheSocketDoesNotTakeWaits) {
  a_->Queue(FrameType::kDecision, std::string(8 << 20, 'x'));
  a_->Flush();
  EXPECT_TRUE(a_->has_unsent());
  EXPECT_FALSE(a_->Flush());
  EXPECT_EQ(Deliver().size(), 1u);
  EXPECT_FALSE(a_->has_unsent());
}

TEST_P(ControlLinkTest, AnEndIsSeenBehindTheLastFrame) {
  a_->Queue(FrameType::kDecision, "last");
  a_->Flush();
  a_.reset();
  EXPECT_TRUE(b_->Receive());
  FrameType type;
  std::string_view bytes;
  EXPECT_TRUE(b_->Next(&type, &bytes));
  EXPECT_EQ(bytes, "last");
  while (b_->why_closed().empty()) b_->Receive();
  EXPECT_EQ(b_->why_closed(), "it was closed");
}

// A link that hears a test's bytes.
class ControlLinkFrameTest : public testing::Test {
 protected:
  ControlLinkFrameTest() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    link_ = std::make_unique<ControlLink>(ends[0], 1);
    other_ = ends[1];
  }
  ~ControlLinkFrameTest() override { close(other_); }

  // Returns whether that is a frame.
  bool Hear(uint32_t bytes, uint32_t type, int64_t clock_ns) {
    const uint32_t start[] = {bytes, type};
    std::string header(reinterpret_cast<const char*>(start), sizeof(start));
    header.append(reinterpret_cast<const char*>(&clock_ns), sizeof(clock_ns));
    EXPECT_EQ(write(other_, header.data(), header.size()), 16);
    EXPECT_TRUE(link_->Receive());
    FrameType found;
    std::string_view frame;
    return link_->Next(&found, &frame);
  }

  std::unique_ptr<ControlLink> link_;
  int other_;
};

constexpr int64_t kDay = 86'400'000'000'000;

TEST_F(ControlLinkFrameTest, OfNoTypeEndsTheLink) {
  EXPECT_FALSE(Hear(0, 0, 0));
  EXPECT_EQ(link_->why_closed(),
            "it sent a frame of type 0 and 0 bytes, which does not exist");
}

TEST_F(ControlLinkFrameTest, OfAnUnknownTypeEndsTheLink) {
  EXPECT_FALSE(Hear(0, 63, 0));
  EXPECT_EQ(link_->why_closed(),
            "it sent a frame of type 63 and 0 bytes, which does not exist");
}

TEST_F(ControlLinkFrameTest, TooLongEndsTheLink) {
  EXPECT_FALSE(Hear(0xffffffff, 1, 0));
  EXPECT_EQ(link_->why_closed(),
            "it sent a frame of type 1 and 4294967295 bytes, which does not exist");
}

// Cores' clocks may differ.
TEST_F(ControlLinkFrameTest, OfATimeBeforeTheLastOnesWasSentThen) {
  EXPECT_TRUE(Hear(0, 1, kDay));
  const Clock::time_point sent = link_->sent_at();
  EXPECT_TRUE(Hear(0, 1, kDay - 1000));
  EXPECT_GE(link_->sent_at(), sent);
}

TEST_F(ControlLinkFrameTest, ThatIsRefusedIsTheLast) {
  EXPECT_FALSE(link_->has_refused());
  EXPECT_FALSE(Hear(0, 63, 0));
  EXPECT_TRUE(link_->has_refused());
  char nothing;
  EXPECT_EQ(read(other_, &nothing, 1), 0);
}

TEST_F(ControlLinkFrameTest, OfATimeThatNoClockShowsEndsTheLink) {
  EXPECT_FALSE(Hear(0, 1, std::numeric_limits<int64_t>::max()));
  EXPECT_EQ(link_->why_closed(),
            "it sent a frame of the time 9223372036854775807 ns, which does not exist");
}

TEST_F(ControlLinkFrameTest, OfATimeBeforeTheClockBeganEndsTheLink) {
  EXPECT_FALSE(Hear(0, 1, -1));
}

// The first frame is read at once, the second one a while after it was sent.
TEST_F(ControlLinkFrameTest, TheTimeIsWhenItWasSentByThisHostsClock) {
  const Clock::time_point before = Clock::now();
  ASSERT_TRUE(Hear(0, 1, kDay));
  const Clock::time_point after = Clock::now();
  EXPECT_GE(link_->sent_at(), before);
  EXPECT_LE(link_->sent_at(), after);
  while (Clock::now() < after + std::chrono::milliseconds(50)) continue;
  ASSERT_TRUE(Hear(0, 1, kDay + 1000));
  const Clock::duration drift = (Clock::now() - before) / PeerClock::kMostDrift;
  EXPECT_GE(link_->sent_at(), before + std::chrono::microseconds(1));
  EXPECT_LE(link_->sent_at(), after + std::chrono::microseconds(1) + drift);
}

TEST_P(ControlLinkTest, BothEndsFinishAndNothingIsLost) {
  const auto deadline = Clock::now() + kForever;
  std::string received;
  a_->Queue(FrameType::kDeparture, std::string(4 << 20, 'z'));
  std::thread peer([&] {
    FrameType type;
    std::string_view bytes;
    while (!b_->Next(&type, &bytes)) b_->Receive();
    received = bytes;
    b_->Queue(FrameType::kDecision, "that the other end does not read");
    b_->Finish(deadline);
  });
  a_->Finish(deadline);
  a_->AwaitEnd(deadline);
  peer.join();
  EXPECT_EQ(received, std::string(4 << 20, 'z'));
  EXPECT_EQ(a_->why_closed(), "it was closed");
}

}  // namespace
}  // namespace keras_hvd
