// An engine's waits: callers that drive meanwhile, stalls that are reported, and rest.
#include <dirent.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "tf_ops/engine/engine_testing.h"

namespace keras_hvd {
namespace {

// ---- Callers that drive

// Runs `body` on a thread that waits for the end of `ask` meanwhile.
Status WhileDriving(Rank& rank, Ask ask, const std::function<void()>& body) {
  Status status;
  std::thread caller([&] { status = rank.Drive(std::move(ask)); });
  EXPECT_TRUE(rank.AwaitPending());
  body();
  caller.join();
  return status;
}

TEST(DrivingTest, ACallerGetsItsResultThoughThePeersComeMuchLater) {
  for (int caller : {0, 1}) {
    Job job(2);
    const Status status = WhileDriving(job[caller], Sum("x", {1}), [&] {
      const int64_t sleeps = job[caller].counters().sleeps;
      EXPECT_TRUE(Eventually([&] { return job[caller].counters().sleeps > sleeps; }));
      EXPECT_TRUE(job[1 - caller].Run(Sum("x", {1})).ok());
    });
    EXPECT_TRUE(status.ok()) << status.message;
  }
}

TEST(DrivingTest, ACallerHearsOfAFailure) {
  for (int caller : {0, 1}) {
    Job job(2);
    const Status status = WhileDriving(job[caller], Sum("x", {1}), [&] {
      EXPECT_TRUE(job.state(0).Fail(Code::kRankFailed, "rank 1 fell over"));
    });
    EXPECT_EQ(status.code, Code::kRankFailed);
    EXPECT_TRUE(Contains(status.message, "rank 1 fell over")) << status.message;
  }
}

TEST(DrivingTest, ACallerHearsOfADeparture) {
  for (int caller : {0, 1}) {
    Job job(2);
    const Status status =
        WhileDriving(job[caller], Sum("x", {1}), [&] { job[1 - caller].Leave(); });
    EXPECT_EQ(status.code, Code::kRankFailed);
    EXPECT_TRUE(Contains(status.message, "has left the job")) << status.message;
  }
}

TEST(DrivingTest, AnEngineThatStopsEndsWhatItsCallersWaitFor) {
  for (int caller : {0, 1}) {
    Job job(2);
    const Status status =
        WhileDriving(job[caller], Sum("x", {1}), [&] { job[caller].Stop(); });
    EXPECT_EQ(status.code, Code::kShutDown);
    EXPECT_EQ(job[caller].Drive(Sum("y", {1})).code, Code::kShutDown);
  }
}

TEST(DrivingTest, ASmallRequestMayEndOnTheThreadThatSubmitsIt) {
  Job job(1);
  int here = 0;
  // How many do is up to the scheduler: not those at which the engine's thread looked.
  for (int i = 0; i < 10000 && here <= 20; ++i) {
    Ask ask = Sum("x", {1});
    ask.on_end = [&, caller = std::this_thread::get_id()] {
      here += std::this_thread::get_id() == caller;
    };
    EXPECT_TRUE(job[0].Run(std::move(ask)).ok());
  }
  EXPECT_GT(here, 20);
}

TEST(DrivingTest, WhatIsSubmittedMeanwhileIsNotForTheThreadOfASmallRequest) {
  EngineOptions options;
  options.cores = 2;
  Job job(2, options);
  int there = 0;
  // In how many rounds the thread still waits by then is up to the scheduler. Of the
  // two, the first one submitted has an even number, and may be driven.
  for (int i = 0; i < 2000 && there == 0; ++i) {
    std::atomic<bool> submits{false};
    std::thread op([&] {
      submits = true;
      job[0].Submit(Sum("small", {1}));
    });
    while (!submits) std::this_thread::yield();
    Ask other = Sum("other", {1});
    other.on_end = [&, thread = op.get_id()] {
      there += std::this_thread::get_id() == thread;
    };
    job[1].Submit(Sum("other", {1}));
    job[0].AwaitEnd(job[0].Submit(other));
    EXPECT_TRUE(job[1].Run(Sum("small", {1})).ok());
    op.join();
  }
  EXPECT_EQ(there, 0);
  job[0].EndAll();
}

// ---- Stalls

TEST(StallTest, IsReportedOnceWithWhoIsWhere) {
  EngineOptions options;
  options.stall_warning_seconds = 0.01;
  Job job(3, options);
  job.ForEach([](Rank& self, int) { ASSERT_TRUE(self.Run(Sum("a", {1})).ok()); });
  CapturedErrors errors;
  for (int rank : {0, 2}) job[rank].Submit(Sum("grad/w", {1}));
  ASSERT_TRUE(errors.AwaitText("its last was allreduce 'a'"));
  // A second stall is looked for in the same round as the first: were it reported
  // again, that would have come first.
  for (int rank : {0, 2}) job[rank].Submit(Sum("grad/v", {1}));
  ASSERT_TRUE(errors.AwaitText("allreduce 'grad/v', which not every rank has reached"));
  for (const char* name : {"grad/w", "grad/v"}) {
    EXPECT_TRUE(job[1].Run(Sum(name, {1})).ok());
  }
  for (int rank : {0, 2}) job[rank].EndAll();
  const std::string text = errors.text();
  EXPECT_EQ(Count(text, "keras_hvd [rank 0] warning: "), 2u) << text;
  EXPECT_EQ(Count(text, "s for allreduce 'grad/w', which not every rank"), 1u) << text;
  EXPECT_EQ(Count(text, "\n  rank 1 (pid " + std::to_string(getpid()) +
                            " on here) has not; its last was allreduce 'a'"),
            2u)
      << text;
}

TEST(StallTest, AbortsTheJobIfAsked) {
  EngineOptions options;
  options.stall_warning_seconds = -1;
  options.stall_abort_seconds = 0.05;
  Job job(2, options);
  CapturedErrors errors;
  const Status status = job[1].Run(Sum("x", {1}));
  EXPECT_EQ(status.code, Code::kRankFailed);
  EXPECT_TRUE(Contains(status.message, "rank 1 waited"));
  EXPECT_TRUE(Contains(status.message, "rank 0 (pid " + std::to_string(getpid()) +
                                           " on here) has not; it has submitted "
                                           "nothing yet"))
      << status.message;
  EXPECT_TRUE(Contains(status.message, "KERAS_HVD_STALL_ABORT_SECONDS"));
  EXPECT_EQ(job[0].Run(Meet("y")).code, Code::kRankFailed);
  EXPECT_EQ(Count(errors.text(), "What each rank did last:"), 1u) << errors.text();
}

TEST(StallTest, InTheMiddleOfACollectiveNamesTheRankThatHoldsItUp) {
  EngineOptions options;
  options.stall_warning_seconds = 0.01;
  options.stall_abort_seconds = 1;
  Job job(2, options);
  CapturedErrors errors;
  std::atomic<bool> released{false};
  Ask ask = Gather("x", kManyRows);
  ask.on_allocate = [&] { EXPECT_TRUE(Eventually([&] { return released.load(); })); };
  const size_t number = job[0].Submit(ask);
  const Status status = job[1].Run(Gather("x", kManyRows));
  released = true;
  EXPECT_EQ(status.code, Code::kRankFailed);
  EXPECT_TRUE(Contains(status.message, "has not answered for 1 s in allgather 'x'"))
      << status.message;
  EXPECT_EQ(job[0].End(number).code, Code::kRankFailed);
  EXPECT_EQ(Count(errors.text(), "warning: rank 0 "), 1u) << errors.text();
}

TEST(StallTest, ARequestThatIsUnderWayAgainAndAgainDoesNotStall) {
  EngineOptions options;
  options.stall_warning_seconds = -1;
  options.stall_abort_seconds = 3;
  Job job(2, options);
  // For five seconds there is always one more of the name than both have submitted.
  const Clock::time_point end = Clock::now() + std::chrono::seconds(5);
  size_t number = job[0].Submit(Sum("x", {1}));
  while (Clock::now() < end) {
    const size_t next = job[0].Submit(Sum("x", {1}));
    ASSERT_TRUE(job[1].Run(Sum("x", {1})).ok());
    ASSERT_TRUE(job[0].End(number).ok());
    number = next;
  }
  ASSERT_TRUE(job[1].Run(Sum("x", {1})).ok());
}

// ---- Rest

// Nanoseconds that this process' engine threads have run.
int64_t EngineNanoseconds() {
  int64_t sum = 0;
  DIR* tasks = opendir("/proc/self/task");
  while (const dirent* task = readdir(tasks)) {
    const std::string path = std::string("/proc/self/task/") + task->d_name;
    std::string name;
    int64_t nanoseconds = 0;
    std::ifstream(path + "/comm") >> name;
    if (name != "keras_hvd") continue;
    if (!(std::ifstream(path + "/schedstat") >> nanoseconds)) ADD_FAILURE();
    sum += nanoseconds;
  }
  closedir(tasks);
  return sum;
}

TEST(IdleTest, AnIdleEngineUsesNoTime) {
  Job job(3);
  job.ForEach([](Rank& self, int) { ASSERT_TRUE(self.Run(Sum("a", {1})).ok()); });
  for (int rank = 0; rank < 3; ++rank) ASSERT_TRUE(job[rank].AwaitRest());
  const int64_t before = EngineNanoseconds();
  EXPECT_GT(before, 0);
  poll(nullptr, 0, 2000);  // the time that is measured
  EXPECT_EQ(EngineNanoseconds(), before);
  // And it wakes up.
  job.ForEach([](Rank& self, int) { ASSERT_TRUE(self.Run(Sum("a", {1})).ok()); });
}

}  // namespace
}  // namespace keras_hvd
