// The engine with tensors on GPUs where a rank leaves: nobody waits on its GPU for what
// that rank never enqueues.
#include <gtest/gtest.h>

#include <future>
#include <string>
#include <thread>
#include <vector>

#include "tf_ops/engine/engine_gpu_testing.h"

namespace keras_hvd {
namespace {

using stand_in::StandIn;

// The other would wait for it on its GPU for ever.
TEST(GpuLeavingTest, ARankThatLeavesBeforeItsGpuIsDoneEndsTheJob) {
  const StandIn libraries;
  for (const Layout& layout : {Layout{{0, 0}}, Layout{{0, 1}}}) {
    GpuJob job(libraries, layout, 1);
    job.Connect();
    libraries->HoldCollectives(1, true);
    job.ForEach([&](GpuRank& self, int) {
      ASSERT_TRUE(self.End(self.Submit(Sum("held", {1}))).ok());
    });
    job.Stop(1);
    job[0].Synchronize();
    EXPECT_TRUE(job.state().Failed());
    const Status status = job[0].End(job[0].Submit(Sum("later", {1})));
    EXPECT_TRUE(Contains(status.message, "left the job in the middle of"))
        << status.message;
    EXPECT_TRUE(Contains(status.message, "'held'")) << status.message;
    libraries->HoldCollectives(1, false);
  }
}

int64_t Polls(const StandIn& libraries, int rank) {
  int64_t polls = 0;
  for (const stand_in::Call& call : libraries->Calls()) {
    if (call.rank == rank && call.function == "cuEventQuery") polls += call.times;
  }
  return polls;
}

// Of the job, because a rank has left without running what it had asked for last.
void ExpectFailure(GpuRank* other, int leaver) {
  const Status status = other->End(other->Submit(Sum("later", {1})));
  EXPECT_EQ(status.code, Code::kRankFailed);
  EXPECT_TRUE(Contains(status.message, "rank " + std::to_string(leaver)))
      << status.message;
  EXPECT_TRUE(Contains(status.message, "left the job ")) << status.message;
  EXPECT_TRUE(Contains(status.message, "allreduce 'last'")) << status.message;
}

// It has asked for something that is decided while it waits for its GPU, on its way
// out; or, which is as good, before that.
void LeaveWithoutRunningWhatWasDecided(int leaver, const Layout& layout) {
  const StandIn libraries;
  GpuJob job(libraries, layout, 1);
  job.Connect();
  libraries->HoldCollectives(1 - leaver, true);
  job.ForEach([](GpuRank& self, int) {
    ASSERT_TRUE(self.End(self.Submit(Sum("held", {1}))).ok());
  });
  const size_t last = job[leaver].Submit(Sum("last", {1}));
  const int64_t polls = Polls(libraries, leaver);
  std::thread leaves([&] { job.Stop(leaver); });
  // It does nothing else any more.
  EXPECT_TRUE(Eventually([&] { return Polls(libraries, leaver) > polls + 100; }));
  GpuRank& other = job[1 - leaver];
  const size_t number = other.Submit(Sum("last", {1}));
  const Status enqueued = other.End(number);
  libraries->HoldCollectives(1 - leaver, false);
  leaves.join();
  EXPECT_EQ(job[leaver].End(last).code, Code::kShutDown);
  other.Synchronize();
  EXPECT_TRUE(enqueued.ok()) << enqueued.message;
  ExpectFailure(&other, leaver);
}

TEST(GpuLeavingTest, ARankThatDoesNotRunWhatWasDecidedEndsTheJob) {
  LeaveWithoutRunningWhatWasDecided(1, Layout{{0, 0}});
}

TEST(GpuLeavingTest, ARankThatDoesNotRunWhatWasDecidedEndsTheJobOnOtherHosts) {
  LeaveWithoutRunningWhatWasDecided(1, Layout{{0, 1}});
  LeaveWithoutRunningWhatWasDecided(0, Layout{{0, 1}});
}

// Rank 0 hears of the request and of the departure at once.
TEST(GpuLeavingTest, ARankThatLeavesBeforeItsRequestIsDecidedEndsTheJob) {
  const StandIn libraries;
  GpuJob job(libraries, Layout{{0, 1}}, 1);
  job.Connect();
  const size_t last = job[0].Submit(Sum("last", {1}));
  std::promise<void> is_busy, goes_on;
  Ask busy = Sum("busy", {1});
  const size_t of_other = job[1].Submit(busy);
  busy.on_end = [&] {
    is_busy.set_value();
    goes_on.get_future().wait();
  };
  job[0].Submit(busy);
  is_busy.get_future().wait();
  ASSERT_TRUE(job[1].End(of_other).ok());
  const size_t of_leaver = job[1].Submit(Sum("last", {1}));
  job.Stop(1);
  EXPECT_EQ(job[1].End(of_leaver).code, Code::kShutDown);
  goes_on.set_value();
  EXPECT_EQ(job[0].End(last).code, Code::kRankFailed);
  job[0].Synchronize();
  ExpectFailure(&job[0], 1);
}

}  // namespace
}  // namespace keras_hvd
