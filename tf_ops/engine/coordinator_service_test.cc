// The coordinator's side of the coordination: nonsense from a rank, and tunings.
#include "tf_ops/engine/coordinator_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "tf_ops/backend/world.h"
#include "tf_ops/timeline/timeline.h"

namespace keras_hvd {
namespace {

using testing::HasSubstr;

TEST(MalformedSubmissionTest, FailsTheJobAndNamesItsSender) {
  std::shared_ptr<Segment> segment;
  ASSERT_TRUE(Segment::CreateLocal(2, 1 << 20, &segment).ok());
  const World world = SharedMemoryWorld(segment, 0);
  Timeline timeline(world.job);
  CoordinatorService service(world, /*fusion_bytes=*/1 << 20, 16, &timeline);
  const auto submissions = SharedMemoryWorld(segment, 1).channels->ToLeader();
  const int64_t flags = 99;
  submissions->Queue({reinterpret_cast<const char*>(&flags), sizeof(flags)});
  submissions->Flush();
  service.Poll();
  EXPECT_EQ(world.job->Failure().code, Code::kInternal);
  EXPECT_THAT(world.job->Failure().message, HasSubstr("rank 1"));
  EXPECT_THAT(world.job->Failure().message, HasSubstr("flags = 99"));
}

// The driving thread may stop after the batch that ends a sample.
TEST(TuningTest, LeavesWithTheBatchThatItFollowsFrom) {
  std::shared_ptr<Segment> segment;
  ASSERT_TRUE(Segment::CreateLocal(2, 1 << 20, &segment).ok());
  const World world = SharedMemoryWorld(segment, 0);
  Timeline timeline(world.job);
  CoordinatorService service(world, /*fusion_bytes=*/1 << 20, 16, &timeline);
  AutotuneOptions options;
  options.on = true;
  options.steps_per_sample = 1;
  options.least_seconds = 0;
  options.most_window_bytes = 1 << 20;
  service.StartAutotune(options, Tuning());
  service.Poll();
  const auto receiver = SharedMemoryWorld(segment, 1).channels->FromLeader();
  ASSERT_TRUE(receiver->Receive());
  service.NoteTuned();
  for (int run = 0; run < 10000 && !receiver->HasNews(); ++run) {
    service.NoteRun({{0, "gradient"}}, 1 << 20);
  }
  EXPECT_TRUE(receiver->HasNews());
}

}  // namespace
}  // namespace keras_hvd
