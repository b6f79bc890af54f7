// The engine with tensors on GPUs where a rank leaves: nobody waits on its GPU for what
// that rank never enqueues.
#include <gtest/gtest.h>

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
  GpuJob job(libraries, 2, 1);
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

int64_t Polls(const StandIn& libraries, int rank) {
  int64_t polls = 0;
  for (const stand_in::Call& call : libraries->Calls()) {
    if (call.rank == rank && call.function == "cuEventQuery") polls += call.times;
  }
  return polls;
}

// It has asked for something that is decided while it waits for its GPU, on its way
// out; or, which is as good, before that.
TEST(GpuLeavingTest, ARankThatDoesNotRunWhatWasDecidedEndsTheJob) {
  const StandIn libraries;
  GpuJob job(libraries, 2, 1);
  job.Connect();
  libraries->HoldCollectives(0, true);
  job.ForEach([](GpuRank& self, int) {
    ASSERT_TRUE(self.End(self.Submit(Sum("held", {1}))).ok());
  });
  const size_t last = job[1].Submit(Sum("last", {1}));
  const int64_t polls = Polls(libraries, 1);
  std::thread leaves([&] { job.Stop(1); });
  // It does nothing else any more.
  EXPECT_TRUE(Eventually([&] { return Polls(libraries, 1) > polls + 100; }));
  const size_t number = job[0].Submit(Sum("last", {1}));
  const Status enqueued = job[0].End(number);
  libraries->HoldCollectives(0, false);
  leaves.join();
  EXPECT_EQ(job[1].End(last).code, Code::kShutDown);
  job[0].Synchronize();
  EXPECT_TRUE(enqueued.ok()) << enqueued.message;
  const Status status = job[0].End(job[0].Submit(Sum("later", {1})));
  EXPECT_EQ(status.code, Code::kRankFailed);
  EXPECT_TRUE(Contains(status.message, "rank 1")) << status.message;
  EXPECT_TRUE(Contains(status.message, "left the job in the middle of"))
      << status.message;
  EXPECT_TRUE(Contains(status.message, "'last'")) << status.message;
}

}  // namespace
}  // namespace keras_hvd
