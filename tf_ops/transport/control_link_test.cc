// ControlLink: frames of any length, complete and in order.
#include "tf_ops/transport/control_link.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

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

TEST(ControlLinkFrameTest, WhatIsNoFrameEndsTheLink) {
  for (const char* bytes :
       {"\1\0\0\0\0\0\0\0", "\1\0\0\0\77\0\0\0", "\377\377\377\377\1\0\0\0"}) {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    ControlLink link(ends[0], 1);
    ASSERT_EQ(write(ends[1], bytes, 8), 8);
    EXPECT_TRUE(link.Receive());
    FrameType type;
    std::string_view frame;
    EXPECT_FALSE(link.Next(&type, &frame));
    EXPECT_NE(link.why_closed().find("which does not exist"), std::string::npos);
    close(ends[1]);
  }
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
