// Ranks that have joined: collectives that go on without them, and those that do not.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tf_ops/engine/engine_testing.h"

namespace keras_hvd {
namespace {

class JoinOfRanksTest : public testing::TestWithParam<int> {};

TEST_P(JoinOfRanksTest, AJoinedRankGivesZerosUntilAllHaveJoined) {
  const int size = GetParam();
  for (const bool together : {false, true}) {
    EngineOptions options;
    options.check = together;
    Job job(size, options);
    std::vector<int32_t> last(size);
    job.ForEach([&](Rank& self, int rank) {
      for (int epoch = 0; epoch < 3; ++epoch) {
        // The rank that has most data is another one in each epoch.
        const auto steps_of = [&](int r) { return 5 + 7 * ((r + epoch) % size); };
        std::vector<size_t> numbers;
        for (int step = 0; step < steps_of(rank); ++step) {
          const std::string name = "step " + std::to_string(step);
          const ReduceOp op = step % 2 == 0 ? ReduceOp::kSum : ReduceOp::kAverage;
          const std::vector<float> values(step % 5 == 0 ? 3000 : 3, rank + 1);
          numbers.push_back(self.Submit(Sum(name, values, op)));
          if (!together) self.AwaitEnd(numbers.back());
        }
        int32_t joined = -1;
        EXPECT_EQ(self.engine().Join(&joined).message, "");
        last[rank] = joined;
        for (size_t step = 0; step < numbers.size(); ++step) {
          EXPECT_EQ(self.End(numbers[step]).message, "");
          float sum = 0;
          for (int r = 0; r < size; ++r) {
            if (steps_of(r) > static_cast<int>(step)) sum += r + 1;
          }
          if (step % 2 == 1) sum /= size;
          for (float value : FromBytes<float>(self.Output(numbers[step]))) {
            ASSERT_FLOAT_EQ(value, sum);
          }
        }
        ASSERT_TRUE(self.Run(Meet("epoch")).ok());
        EXPECT_EQ(last, std::vector<int32_t>(size, last[rank]));
        const int most = (2 * size - 1 - epoch % size) % size;
        if (!together) {
          EXPECT_EQ(joined, most);
        }
        ASSERT_TRUE(self.Run(Meet("compared")).ok());
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, JoinOfRanksTest, testing::Range(1, 6));

TEST(JoinTest, RanksThatGoOnWithoutOthersForLongAreReportedOnceAndGoOn) {
  EngineOptions options;
  options.stall_warning_seconds = 0.3;
  options.stall_abort_seconds = 0.6;
  Job job(3, options);
  CapturedErrors errors;
  const auto go_on_until = [&](const std::function<bool()>& enough) {
    while (!enough()) {
      for (int rank : {0, 2}) job[rank].Submit(Sum("x", {1}, ReduceOp::kAverage));
      for (int rank : {0, 2}) job[rank].EndAll();
    }
  };
  std::thread joined([&] {
    int32_t last;
    EXPECT_EQ(job[1].engine().Join(&last).message, "");
  });
  go_on_until(
      [&] { return Contains(errors.text(), "rank 1 has taken part in no step"); });
  // Long enough for a second report, or for the job's end, were there one.
  const Clock::time_point warned = Clock::now();
  go_on_until([&] { return Clock::now() > warned + 3 * StallWatch::kInterval; });
  std::vector<std::thread> others;
  for (int rank : {0, 2}) {
    others.emplace_back([&, rank] {
      int32_t last;
      EXPECT_EQ(job[rank].engine().Join(&last).message, "");
    });
  }
  for (std::thread& other : others) other.join();
  joined.join();
  const std::string text = errors.text();
  EXPECT_EQ(Count(text, "keras_hvd [rank 0] warning: "), 1u) << text;
  EXPECT_TRUE(Contains(text,
                       "waits for ranks 0, 2, which go on. What all ranks reduce "
                       "takes zeros from rank 1"))
      << text;
}

TEST(JoinTest, WhatNeedsTheRankFailsOnThoseThatWaitForIt) {
  Job job(3);
  AddSets(&job, {{0, 1}, {0, 2}});
  job.ForEach([&](Rank& self, int rank) {
    if (rank != 1) {
      Ask broadcast = Sum("x", {1});
      broadcast.description.kind = Kind::kBroadcast;
      for (const Ask& ask :
           {Sum("x", {1}, ReduceOp::kMax), Gather("x", {1}), broadcast, Meet("x")}) {
        const Status status = self.Run(ask);
        EXPECT_EQ(status.code, Code::kMismatch);
        EXPECT_TRUE(Contains(status.message, "rank 1 has joined")) << status.message;
      }
      // The others' own go on.
      EXPECT_TRUE(self.Run(In(2, Sum("x", {1}, ReduceOp::kMax))).ok());
    }
    if (rank == 0) {
      const Status status = self.Run(In(1, Sum("x", {1})));
      EXPECT_TRUE(Contains(status.message, "rank 1 has joined")) << status.message;
      EXPECT_TRUE(Contains(status.message, "in process set 1")) << status.message;
    }
    int32_t last = -1;
    EXPECT_TRUE(self.engine().Join(&last).ok());
    EXPECT_TRUE(self.Run(Sum("x", {1}, ReduceOp::kMax)).ok());
  });
}

TEST(JoinTest, ASecondThreadCannotJoin) {
  Job job(2);
  std::thread first([&] {
    int32_t last = -1;
    EXPECT_TRUE(job[1].engine().Join(&last).ok());
    EXPECT_EQ(last, 0);
  });
  // Rank 0's sum ends only once rank 1 has joined.
  EXPECT_TRUE(job[0].Run(Sum("x", {1})).ok());
  int32_t last = -1;
  EXPECT_EQ(job[1].engine().Join(&last).code, Code::kInvalidArgument);
  EXPECT_TRUE(job[0].engine().Join(&last).ok());
  first.join();
}

TEST(JoinTest, EndsWithAnErrorWhenARankLeaves) {
  for (const int leaver : {0, 2}) {
    Job job(3);
    job.ForEach([&](Rank& self, int rank) {
      if (rank == leaver) return self.Leave();
      int32_t last = -1;
      const Status status = self.engine().Join(&last);
      EXPECT_EQ(status.code, Code::kRankFailed);
      EXPECT_TRUE(Contains(status.message, "rank " + std::to_string(leaver)))
          << status.message;
    });
  }
}

TEST(JoinTest, AJoinedRankMayLeave) {
  Job job(2);
  std::thread joined([&] {
    int32_t last = -1;
    EXPECT_EQ(job[1].engine().Join(&last).code, Code::kShutDown);
  });
  EXPECT_TRUE(job[0].Run(Sum("x", {1})).ok());
  job[1].Stop();
  joined.join();
  EXPECT_EQ(job[0].Run(Sum("x", {1})).code, Code::kRankFailed);
}

}  // namespace
}  // namespace keras_hvd
