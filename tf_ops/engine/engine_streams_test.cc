// Channels between the ranks that overflow, and dictionaries that start again.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tf_ops/engine/engine_testing.h"

namespace keras_hvd {
namespace {

std::string LongName(int number) {
  return std::to_string(number) + "/" + std::string(2000, 'n');
}

TEST(OverflowTest, SubmissionsThatDoNotFitWaitAndResume) {
  constexpr int kRequests = 1000;  // 2 MB of names; the channel has 256 KiB
  Job job(3, {}, /*start=*/false);
  for (int rank : {1, 2}) {
    job.Start(rank);
    for (int i = 0; i < kRequests; ++i) job[rank].Submit(Sum(LongName(i), {1.0f}));
    RankBlock& block = job.segment().block(rank);
    ASSERT_TRUE(Eventually([&] { return block.submissions.sender_waits.load() == 1; }));
  }
  job.Start(0);
  for (int i = kRequests; i-- > 0;) job[0].Submit(Sum(LongName(i), {1.0f}));
  job.ForEach([](Rank& self, int) {
    self.EndAll();
    for (int i = 0; i < kRequests; ++i) {
      ASSERT_TRUE(self.End(i).ok());
      ASSERT_EQ(FromBytes<float>(self.Output(i))[0], 3.0f);
    }
  });
}

TEST(OverflowTest, DecisionsThatDoNotFitWaitForTheSlowestReader) {
  constexpr int kRequests = 500;
  Job job(3, {}, /*start=*/false);
  job.Start(0);
  job.Start(1);
  for (int rank : {0, 1}) {
    for (int i = 0; i < kRequests; ++i) {
      // They differ, which is a failure at once.
      job[rank].Submit(Sum(LongName(i), std::vector<float>(1 + rank)));
    }
  }
  RingState& decisions = job.segment().header().decisions;
  ASSERT_TRUE(Eventually([&] { return decisions.sender_waits.load() == 1; }));
  EXPECT_LT(job[1].ended(), static_cast<size_t>(kRequests));
  job.Start(2);
  for (int rank : {0, 1}) {
    job[rank].EndAll();
    for (int i = 0; i < kRequests; ++i) {
      const Status status = job[rank].End(i);
      EXPECT_EQ(status.code, Code::kMismatch);
      EXPECT_TRUE(Contains(status.message, "differs between ranks"));
    }
  }
  job.ForEach([](Rank& self, int) { EXPECT_TRUE(self.Run(Meet("end")).ok()); });
}

// More names than the dictionaries of either direction keep.
TEST(OverflowTest, DictionariesStartAgain) {
  Job job(2);
  job.ForEach([](Rank& self, int rank) {
    for (int i = 0; i < 20000; ++i) self.Submit(Sum(std::to_string(i), {1.0f + rank}));
    self.EndAll();
    // Names of before and new ones.
    for (int i = 0; i < 20000; i += 1000) {
      const size_t number = self.Submit(Sum(std::to_string(i), {2.0f + rank}));
      ASSERT_TRUE(self.End(number).ok());
      ASSERT_EQ(FromBytes<float>(self.Output(number))[0], 5.0f);
    }
    ASSERT_EQ(FromBytes<float>(self.Output(19999))[0], 3.0f);
  });
}

}  // namespace
}  // namespace keras_hvd
