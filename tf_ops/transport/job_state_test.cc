// The state of a job in shared memory: its first failure counts, once, for all.
#include "tf_ops/transport/job_state.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace keras_hvd {
namespace {

constexpr int64_t kExchange = 4096;

TEST(FailureTest, TheFirstOneCounts) {
  std::shared_ptr<Segment> segment;
  ASSERT_TRUE(Segment::CreateLocal(2, kExchange, &segment).ok());
  JobState job(segment, 0);
  EXPECT_FALSE(job.Failed());
  EXPECT_TRUE(job.Failure().ok());
  EXPECT_TRUE(JobState(segment, 1).Fail(Code::kRankFailed, "first", 0));
  EXPECT_FALSE(job.Fail(Code::kInternal, "second"));
  EXPECT_FALSE(job.Fail(Code::kInternal, "its finder died later", 1));
  EXPECT_TRUE(job.Failed());
  EXPECT_EQ(job.Failure().code, Code::kRankFailed);
  EXPECT_EQ(job.Failure().message, "first");
}

TEST(FailureTest, ALongTextIsCut) {
  std::shared_ptr<Segment> segment;
  ASSERT_TRUE(Segment::CreateLocal(1, kExchange, &segment).ok());
  JobState job(segment, 0);
  const std::string text(5000, 'x');
  EXPECT_TRUE(job.Fail(Code::kInternal, text));
  EXPECT_EQ(job.Failure().message, text.substr(0, SegmentHeader::kFailureBytes - 1));
}

TEST(FailureTest, WakesEverybody) {
  std::shared_ptr<Segment> segment;
  ASSERT_TRUE(Segment::CreateLocal(3, kExchange, &segment).ok());
  JobState job(segment, 0);
  std::atomic<int> announced{0};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      Doorbell& bell = segment->block(rank).bell;
      bell.Announce();
      ++announced;
      EXPECT_TRUE(bell.Sleep(Clock::now() + std::chrono::seconds(30)));
      EXPECT_TRUE(job.Failed());
    });
  }
  while (announced < 3) sched_yield();
  job.Fail(Code::kInternal, "wake up");
  for (std::thread& rank : ranks) rank.join();
}

TEST(FailureTest, OneOfManyAtOnceCounts) {
  for (int round = 0; round < 200; ++round) {
    std::shared_ptr<Segment> segment;
    ASSERT_TRUE(Segment::CreateLocal(4, kExchange, &segment).ok());
    JobState job(segment, 0);
    std::atomic<int> first{0};
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 4; ++rank) {
      ranks.emplace_back([&, rank] {
        const std::string text = "from rank " + std::to_string(rank);
        if (!JobState(segment, rank).Fail(Code::kRankFailed, text)) return;
        ++first;
        EXPECT_EQ(job.Failure().message, text);
      });
    }
    for (std::thread& rank : ranks) rank.join();
    EXPECT_EQ(first, 1);
  }
}

// A rank that dies between its claim and its text leaves the word to the rank that sees
// that.
TEST(FailureTest, AnOrphanedClaimIsTakenOver) {
  std::shared_ptr<Segment> segment;
  ASSERT_TRUE(Segment::CreateLocal(3, kExchange, &segment).ok());
  JobState job(segment, 0);
  segment->header().failure_claimed.store(2 + 1);  // rank 2 claimed, and is dead
  EXPECT_FALSE(job.Fail(Code::kRankFailed, "rank 1 died", 1));
  EXPECT_FALSE(job.Failed());
  EXPECT_TRUE(job.Fail(Code::kRankFailed, "rank 2 died", 2));
  EXPECT_EQ(job.Failure().message, "rank 2 died");
  // Rank 0 has it now; nobody takes it from there.
  EXPECT_FALSE(JobState(segment, 1).Fail(Code::kRankFailed, "rank 0 died", 0));
  EXPECT_EQ(job.Failure().message, "rank 2 died");
}

}  // namespace
}  // namespace keras_hvd
