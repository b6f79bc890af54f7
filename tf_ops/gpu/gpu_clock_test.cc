// Moments on a GPU on the host's clock.
#include "tf_ops/gpu/gpu_clock.h"

#include <gtest/gtest.h>

#include "tf_ops/testing/gpu/stand_in.h"

namespace keras_hvd {
namespace {

// The rounding of a float that holds up to a minute's milliseconds.
constexpr int64_t kRounding = 4'000;

class GpuClockTest : public testing::TestWithParam<uint64_t> {
 protected:
  GpuClockTest() {
    control_->Reset(GetParam());
    std::shared_ptr<const cuda::Driver> driver;
    EXPECT_EQ(cuda::Driver::Open(stand_in::kCudaLibrary, &driver).message, "");
    EXPECT_EQ(cuda::Gpu::Open(driver, 0, &gpu_).message, "");
  }
  ~GpuClockTest() override {
    clock_.Clear();
    gpu_.reset();
    EXPECT_EQ(control_->Violations(), std::vector<std::string>());
    EXPECT_EQ(control_->CountLeaks().sum(), 0);
    control_->Reset(1);
  }

  int64_t CountCalls(const std::string& function) {
    int64_t count = 0;
    for (const stand_in::Call& call : control_->Calls()) {
      if (call.function == function) count += call.times;
    }
    return count;
  }
  // The stand-in's threads may not get a core for longer than the clock waits.
  std::shared_ptr<const GpuReference> Reference() {
    std::shared_ptr<const GpuReference> reference = clock_.Reference(gpu_);
    while (reference == nullptr) {
      clock_.Clear();
      reference = clock_.Reference(gpu_);
    }
    return reference;
  }

  const stand_in::StandIn control_;
  std::shared_ptr<cuda::Gpu> gpu_;
  GpuClock clock_;
};

TEST_P(GpuClockTest, AnEventIsPlacedBetweenItsRecordAndItsSight) {
  const std::shared_ptr<const GpuReference> reference = Reference();
  for (int i = 0; i < 10; ++i) {
    const int64_t before = NowNanoseconds();
    std::shared_ptr<const SharedEvent> event;
    ASSERT_TRUE(RecordOn(gpu_, gpu_->stream(), &event, cuda::Timing::kOn).ok());
    bool passed = false;
    while (!passed) ASSERT_EQ(event->Query(&passed).message, "");
    const int64_t after = NowNanoseconds();
    std::chrono::nanoseconds since;
    ASSERT_EQ(event->Since(*reference->event, &since).message, "");
    const int64_t placed = reference->time + since.count();
    EXPECT_GE(placed, before - reference->within - kRounding);
    EXPECT_LE(placed, after + reference->within + kRounding);
  }
}

TEST_P(GpuClockTest, AReferenceIsKeptForAWhileAndItsEventsAreUsedAgain) {
  const std::shared_ptr<const GpuReference> first = Reference();
  EXPECT_GT(first->within, 0);
  const int64_t records = CountCalls("cuEventRecord");
  clock_.Renew(gpu_);
  EXPECT_EQ(Reference(), first);
  EXPECT_EQ(CountCalls("cuEventRecord"), records);
  // The best of several tries, whose events are given back.
  EXPECT_LE(CountCalls("cuEventCreate"), 3);
  EXPECT_EQ(CountCalls("cuStreamCreateWithPriority"), 2);
}

TEST_P(GpuClockTest, NothingIsMadeBeforeTheFirstIsAskedFor) {
  clock_.Renew(gpu_);
  EXPECT_EQ(CountCalls("cuEventCreate"), 0);
  EXPECT_EQ(CountCalls("cuStreamCreateWithPriority"), 1);
}

TEST_P(GpuClockTest, AGpuThatDoesNotAnswerGivesNone) {
  cuda::Stream stream = nullptr;
  ASSERT_EQ(gpu_->OpenIdleStream(&stream).message, "");
  control_->Hold(stream, true);
  EXPECT_EQ(clock_.Reference(gpu_), nullptr);
  // Nor is it waited for again at once.
  const int64_t records = CountCalls("cuEventRecord");
  EXPECT_EQ(clock_.Reference(gpu_), nullptr);
  EXPECT_EQ(CountCalls("cuEventRecord"), records);
  control_->Hold(stream, false);
  EXPECT_NE(Reference(), nullptr);
}

TEST_P(GpuClockTest, AnErrorOfTheDriversGivesNone) {
  for (const char* function : {"cuStreamCreateWithPriority", "cuEventCreate",
                               "cuEventRecord", "cuEventQuery"}) {
    stand_in::Injection injection;
    injection.function = function;
    injection.code = static_cast<int32_t>(stand_in::kInvalidValue);
    control_->Inject(injection);
    clock_.Clear();
    EXPECT_EQ(clock_.Reference(gpu_), nullptr) << function;
  }
  EXPECT_NE(Reference(), nullptr);
}

INSTANTIATE_TEST_SUITE_P(Seeds, GpuClockTest, testing::Values(1, 2, 3));

}  // namespace
}  // namespace keras_hvd
