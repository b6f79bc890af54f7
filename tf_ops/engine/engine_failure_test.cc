// Every request ends exactly once, whatever goes wrong: mistakes of callers, ranks that
// leave, and the failure of the job.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <random>
#include <string>
#include <vector>

#include "tf_ops/engine/engine_testing.h"

namespace keras_hvd {
namespace {

// ---- Mistakes

TEST(MistakeTest, AMismatchFailsOnEveryRankAndNowhereElse) {
  Job job(3);
  job.ForEach([](Rank& self, int rank) {
    const size_t good = self.Submit(Sum("good", {1, 2}));
    const Status status =
        self.Run(Sum("grad/w", std::vector<float>(rank == 2 ? 4 : 3)));
    EXPECT_EQ(status.code, Code::kMismatch);
    EXPECT_TRUE(Contains(status.message, "allreduce 'grad/w' failed on rank " +
                                             std::to_string(rank) +
                                             ": 'grad/w' differs between ranks ("))
        << status.message;
    EXPECT_TRUE(self.End(good).ok());
    EXPECT_TRUE(self.Run(Sum("grad/w", {1, 2, 3})).ok());
    self.CheckEnds();
  });
}

TEST(MistakeTest, ANameUnderWayInAnotherOpFailsOnEveryRank) {
  Job job(2);
  const size_t first = job[0].Submit(Sum("x", {1}));
  Ask other = Sum("x", {1});
  other.submitter = 2;
  const size_t second = job[0].Submit(other);
  EXPECT_TRUE(job[1].Run(Sum("x", {2})).ok());
  EXPECT_TRUE(job[0].End(first).ok());
  EXPECT_EQ(FromBytes<float>(job[0].Output(first))[0], 3.0f);
  for (const Status& status : {job[0].End(second), job[1].Run(Sum("x", {2}))}) {
    EXPECT_EQ(status.code, Code::kMismatch);
    EXPECT_TRUE(Contains(status.message, "submitted on rank 0 by a second op"))
        << status.message;
  }
  job.ForEach([](Rank& self, int) { EXPECT_TRUE(self.Run(Sum("x", {2})).ok()); });
}

TEST(MistakeTest, ADecisionMayNotRunTogetherWhatDiffers) {
  std::shared_ptr<Segment> segment;
  ASSERT_TRUE(Segment::CreateLocal(2, 1 << 20, &segment).ok());
  Rank self(EngineOptions(), SharedMemoryWorld(segment, 1));
  const size_t sum = self.Submit(Sum("sum", std::vector<float>(1000)));
  const size_t most =
      self.Submit(Sum("most", std::vector<float>(1000), ReduceOp::kMax));
  const World coordinator = SharedMemoryWorld(segment, 0);
  const auto decisions = coordinator.channels->ToRanks();
  Decision decision;
  decision.tensors = {{0, "sum"}, {0, "most"}};
  decision.ranks = {0, 1};
  decisions->Queue(DecisionEncoder(16, {0, 0}).Encode(decision));
  decisions->Flush();
  coordinator.job->RingAll();
  for (const size_t number : {sum, most}) {
    EXPECT_EQ(self.End(number).code, Code::kInternal);
    EXPECT_TRUE(Contains(self.End(number).message,
                         "rank 1 was told to run as one allreduce 'sum' and allreduce "
                         "'most'"))
        << self.End(number).message;
  }
}

// ---- Departures

TEST(DepartureTest, OfAnyRankEndsWhatWaitsForIt) {
  for (int leaver : {0, 1, 2}) {
    Job job(3);
    job.ForEach([&](Rank& self, int) { ASSERT_TRUE(self.Run(Sum("a", {1})).ok()); });
    std::vector<size_t> numbers(3);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank != leaver) numbers[rank] = job[rank].Submit(Sum("x", {1}));
    }
    const size_t own = job[leaver].Submit(Sum("y", {1}));
    job[leaver].Leave();
    EXPECT_EQ(job[leaver].End(own).code, Code::kShutDown);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == leaver) continue;
      const std::string who = "rank " + std::to_string(leaver) + " (pid " +
                              std::to_string(getpid()) + " on here) has left the job";
      for (const Status& status :
           {job[rank].End(numbers[rank]), job[rank].Run(Sum("y", {1})),
            job[rank].Run(Meet("z"))}) {
        EXPECT_EQ(status.code, Code::kRankFailed);
        EXPECT_TRUE(Contains(status.message, who)) << status.message;
      }
      job[rank].CheckEnds();
    }
  }
}

// The coordinator is gone while the others have nothing to do, and sleep until rung.
TEST(DepartureTest, OfTheCoordinatorIsSeenByALaterRequest) {
  Job job(2);
  job.ForEach([&](Rank& self, int) { ASSERT_TRUE(self.Run(Sum("a", {1})).ok()); });
  job[0].Leave();
  ASSERT_TRUE(job[1].AwaitRest());
  const Status status = job[1].Run(Sum("x", {1}));
  EXPECT_EQ(status.code, Code::kRankFailed);
  EXPECT_TRUE(Contains(status.message, "rank 0")) << status.message;
}

TEST(DepartureTest, AllMayLeaveAtOnceAfterTheirLastCollective) {
  for (int round = 0; round < 100; ++round) {
    Job job(4);
    job.ForEach([&](Rank& self, int) {
      EXPECT_TRUE(self.Run(Sum("last", std::vector<float>(3000, 1))).ok());
      self.Leave();
    });
    EXPECT_TRUE(job.state().Failure().ok()) << job.state().Failure().message;
  }
}

// A rank that shuts down while a peer holds up their collective waits for a while, then
// goes; the peer learns of it.
TEST(DepartureTest, InTheMiddleOfACollective) {
  Job job(2);
  std::atomic<bool> held{false}, gone{false};
  Ask ask = Gather("x", kManyRows);
  ask.on_allocate = [&] {
    held = true;
    EXPECT_TRUE(Eventually([&] { return gone.load(); }));
  };
  const size_t number = job[0].Submit(ask);
  const size_t other = job[1].Submit(Gather("x", kManyRows));
  ASSERT_TRUE(Eventually([&] { return held.load(); }));
  job[1].Leave();
  gone = true;
  EXPECT_EQ(job[1].End(other).code, Code::kShutDown);
  const Status status = job[0].End(number);
  EXPECT_EQ(status.code, Code::kRankFailed);
  EXPECT_TRUE(Contains(status.message, "left the job in the middle of allgather 'x'"))
      << status.message;
}

// ---- Failures

TEST(FailureTest, EndsEverythingExactlyOnce) {
  std::mt19937 random(3);
  size_t failed = 0;
  for (int round = 0; round < 60; ++round) {
    Job job(3);
    const int at = random() % 150;
    job.ForEach([&](Rank& self, int rank) {
      for (int i = 0; i < 200; ++i) {
        Ask ask = Sum(std::to_string(i), std::vector<float>(i % 7 == 0 ? 4000 : 5));
        if (i == at && rank == round % 3) {
          ask.on_end = [&] {
            EXPECT_TRUE(job.state(1).Fail(Code::kRankFailed, "rank 2 fell over"));
          };
        }
        self.Submit(ask);
      }
      // One that never runs: no other rank submits it.
      const Status status = self.Run(Meet("without " + std::to_string(rank)));
      EXPECT_EQ(status.code, Code::kRankFailed);
      EXPECT_TRUE(Contains(status.message, "rank 2 fell over")) << status.message;
      EXPECT_TRUE(Contains(status.message, "The job cannot go on")) << status.message;
      self.EndAll();
      const Status later = self.Run(Meet("later"));
      EXPECT_EQ(later.code, Code::kRankFailed);
      EXPECT_TRUE(Contains(later.message, "barrier 'later' failed on rank " +
                                              std::to_string(rank) +
                                              ": rank 2 fell over"));
    });
    for (int rank = 0; rank < 3; ++rank) failed += job[rank].failed();
  }
  // More than those that could not run anyway.
  EXPECT_GT(failed, 3u * 60);
}

// Shutting down just after a failure, when no timed sleep helps a wake that is missed.
TEST(FailureTest, ThenShutdownAtAnyMoment) {
  for (int round = 0; round < 300; ++round) {
    Job job(2);
    job.state(0).Fail(Code::kRankFailed, "enough");
    if (round % 3 != 0) continue;
    EXPECT_FALSE(job[0].Run(Meet("x")).ok());
  }
}

}  // namespace
}  // namespace keras_hvd
