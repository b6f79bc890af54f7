// What leaders of two hosts ask each other, and how often.
#include "tf_ops/transport/hosts_job_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace keras_hvd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A leader of one of two hosts, and what the other one reads and writes.
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
  void Tell(FrameType type, std::string_view bytes = "") {
    other_->Queue(type, bytes);
    other_->Flush();
    state_->Poll();
  }
  // The types of what the other one has got since the last call.
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

}  // namespace
}  // namespace keras_hvd
