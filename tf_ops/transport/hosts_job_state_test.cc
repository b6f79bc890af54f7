// Questions and news between the leaders of two hosts.
#include "tf_ops/transport/hosts_job_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace keras_hvd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A leader of one of two hosts, and the other one's end of their link.
class Leader {
 public:
  explicit Leader(int rank) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    other_ = std::make_unique<ControlLink>(ends[0], rank);
    std::vector<std::unique_ptr<ControlLink>> links;
    links.push_back(std::make_unique<ControlLink>(ends[1], 1 - rank));
    std::shared_ptr<Segment> segment;
    EXPECT_TRUE(Segment::CreateLocal(1, /*exchange_bytes=*/4096, &segment).ok());
    state_ = std::make_unique<HostsJobState>(
        segment, Topology(rank, {0, 1}),
        std::vector<RankName>{{1, "one"}, {2, "other"}}, std::move(links),
        std::vector<std::unique_ptr<ControlLink>>(), std::chrono::seconds(5));
  }

  HostsJobState& state() { return *state_; }
  void Send(FrameType type, std::string_view bytes = "") {
    other_->Queue(type, bytes);
    other_->Flush();
  }
  void Tell(FrameType type, std::string_view bytes = "") {
    Send(type, bytes);
    state_->Poll();
  }
  void TellBytes(const std::string& bytes) {
    EXPECT_EQ(write(other_->socket(), bytes.data(), bytes.size()),
              static_cast<ssize_t>(bytes.size()));
    state_->Poll();
  }
  // The types of the frames that the other one has got since the last call.
  std::vector<FrameType> Told() {
    state_->Poll();
    other_->Receive();
    std::vector<FrameType> types;
    FrameType type;
    for (std::string_view bytes; other_->Next(&type, &bytes);) types.push_back(type);
    return types;
  }

 private:
  std::unique_ptr<ControlLink> other_;
  std::unique_ptr<HostsJobState> state_;
};

std::string Number(uint64_t number) {
  return std::string(reinterpret_cast<const char*>(&number), sizeof(number));
}

TEST(HostsJobStateTest, AsksForSignsTwiceASecondAtMost) {
  Leader leader(0);
  const Clock::time_point since = Clock::now();
  for (int i = 0; i < 1000; ++i) leader.state().AskForSigns();
  EXPECT_THAT(leader.Told(), ElementsAre(FrameType::kQuestion));
  leader.Tell(FrameType::kSign);
  std::vector<FrameType> told;
  while (told.empty()) {
    leader.state().AskForSigns();
    told = leader.Told();
  }
  EXPECT_THAT(told, ElementsAre(FrameType::kQuestion));
  EXPECT_GE(Clock::now() - since, std::chrono::milliseconds(500));
}

TEST(HostsJobStateTest, ALeaderBelowIsBehindUntilItSaysThatItIsNot) {
  Leader leader(0);
  leader.state().NoteCarriedOut();
  EXPECT_THAT(leader.state().Behind(1), ElementsAre(1));
  EXPECT_THAT(leader.state().Behind(1), ElementsAre(1));
  EXPECT_THAT(leader.Told(), ElementsAre(FrameType::kCarriedOut));
  // That is an answer to an earlier question.
  leader.Tell(FrameType::kCarriedOut, Number(0));
  EXPECT_THAT(leader.state().Behind(1), ElementsAre(1));
  leader.Tell(FrameType::kCarriedOut, Number(1));
  EXPECT_THAT(leader.state().Behind(1), IsEmpty());
  // This rank itself has not carried out as many.
  EXPECT_THAT(leader.state().Behind(2), ElementsAre(0, 1));
}

TEST(HostsJobStateTest, AQuestionFromAboveIsAnsweredOnce) {
  Leader leader(1);
  EXPECT_EQ(leader.state().AskedAbout(), 0u);
  leader.Tell(FrameType::kCarriedOut, Number(7));
  EXPECT_EQ(leader.state().AskedAbout(), 7u);
  leader.state().AnswerAbove();
  EXPECT_EQ(leader.state().AskedAbout(), 0u);
  EXPECT_THAT(leader.Told(), ElementsAre(FrameType::kCarriedOut));
}

TEST(HostsJobStateTest, WhatIsNoMessageIsShown) {
  Leader leader(0);
  leader.TellBytes(std::string("\0\0\0\0\77\0\0\0", 8) + std::string(8, '\0'));
  EXPECT_THAT(leader.state().Failure().message,
              HasSubstr("rank 1 (pid 2 on other) has sent rank 0 "));
  EXPECT_THAT(leader.state().Failure().message,
              HasSubstr("it sent a frame of type 63 and 0 bytes"));
}

// Of leaders above. The second number says how many decisions one has carried out.
TEST(HostsJobStateTest, ADepartureIsKnownBehindTheDecisionsBeforeIt) {
  Leader leader(1);
  leader.Tell(FrameType::kDecision, "some");
  leader.Tell(FrameType::kDeparture, Number(0) + Number(1));
  EXPECT_FALSE(leader.state().PassOnDepartures());
  EXPECT_EQ(leader.state().DepartedAbove(), -1);
  leader.state().neighbors().front().inbox.clear();
  EXPECT_TRUE(leader.state().PassOnDepartures());
  EXPECT_EQ(leader.state().DepartedAbove(), 0);
  EXPECT_FALSE(leader.state().PassOnDepartures());
}

// Of a leader's batch, as it travels.
struct BatchAccount {
  int32_t rank = 1, kind = 0, requests = 1;
  uint32_t zeros = 0;
  int64_t age_ns, duration_ns;
};

// The coordinator has read the earlier frames in time.
TEST(HostsJobStateTest, ABatchThatIsHeardOfLateHasNotEndedLate) {
  using std::chrono::milliseconds;
  Leader leader(0);
  const Clock::time_point before = Clock::now();
  leader.Tell(FrameType::kSign);
  const Clock::time_point after = Clock::now();
  BatchAccount account;
  account.age_ns = 3'000'000;
  account.duration_ns = 2'000'000;
  const std::string bytes(reinterpret_cast<const char*>(&account), sizeof(account));
  leader.Send(FrameType::kBatch, bytes + "x");
  const Clock::time_point sent = Clock::now();
  while (Clock::now() < sent + milliseconds(50)) continue;
  leader.state().Poll();
  const std::vector<BatchElsewhere> batches = leader.state().TakeBatches();
  ASSERT_EQ(batches.size(), 1u);
  EXPECT_EQ(batches[0].end - batches[0].begin, milliseconds(2));
  const Clock::duration drift = (Clock::now() - before) / PeerClock::kMostDrift;
  EXPECT_GE(batches[0].end, after - milliseconds(3));
  EXPECT_LE(batches[0].end, sent - milliseconds(3) + (after - before) + drift);
}

}  // namespace
}  // namespace keras_hvd
