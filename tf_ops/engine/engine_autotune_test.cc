// Engines that tune themselves while they run.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "tf_ops/coordination/autotune_log.h"
#include "tf_ops/engine/engine_testing.h"

namespace keras_hvd {
namespace {

EngineOptions Autotuned() {
  EngineOptions options;
  options.autotune.on = true;
  options.autotune.steps_per_sample = 1;
  options.autotune.least_seconds = 0;
  return options;
}

// Windows and small tensors that differed between ranks would give wrong results, or
// none.
TEST(AutotuneEngineTest, AllRanksChangeTheirSettingsBetweenTheSameBatches) {
  constexpr int kSteps = 300;
  constexpr int kTensors = 4;
  Job job(3, Autotuned(), true, 1 << 20);
  job.ForEach([](Rank& self, int rank) {
    std::mt19937_64 sizes(0);  // the same on all ranks
    for (int step = 0; step < kSteps; ++step) {
      std::vector<size_t> numbers(kTensors), elements(kTensors);
      for (size_t& count : elements) count = 1 + sizes() % (sizes() % 2 ? 20000 : 999);
      for (int i = 0; i < kTensors; ++i) {
        // In another order on each rank.
        const int tensor = (i + rank) % kTensors;
        const float value = static_cast<float>(step + tensor + rank);
        numbers[tensor] = self.Submit(
            Sum(std::to_string(tensor), std::vector<float>(elements[tensor], value)));
      }
      for (int tensor = 0; tensor < kTensors; ++tensor) {
        ASSERT_TRUE(self.End(numbers[tensor]).ok());
        const float sum = static_cast<float>(3 * (step + tensor) + 0 + 1 + 2);
        ASSERT_EQ(FromBytes<float>(self.Output(numbers[tensor])),
                  std::vector<float>(elements[tensor], sum));
      }
    }
    ASSERT_TRUE(self.Run(Meet("end")).ok());
  });
  const int64_t tunings = job[0].counters().tunings;
  EXPECT_GT(tunings, 20);
  for (int rank = 1; rank < job.size(); ++rank) {
    // One more may have been decided after the last batch.
    EXPECT_LE(std::abs(job[rank].counters().tunings - tunings), 1);
  }
}

TEST(AutotuneEngineTest, KeepsALogAndStartsFromIt) {
  EngineOptions options = Autotuned();
  options.autotune.log = testing::TempDir() + "/engine_test_autotune.csv";
  options.autotune.most_samples = 6;
  remove(options.autotune.log.c_str());
  const auto run = [&] {
    Job job(2, options);
    job.ForEach([](Rank& self, int) {
      for (int step = 0; step < 100; ++step) {
        ASSERT_TRUE(self.Run(Sum("x", std::vector<float>(5000, 1))).ok());
      }
    });
    std::ifstream file(options.autotune.log);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string first = run();
  EXPECT_TRUE(Contains(first, "keras_hvd autotune 2: ranks=2 state=result\n")) << first;
  EXPECT_TRUE(Contains(first, ",search\n")) << first;
  ASSERT_TRUE(ReadAutotuneLog(2, &options.autotune).ok());
  const std::string second = run();
  EXPECT_TRUE(Contains(second, " state=result\n")) << second;
  EXPECT_FALSE(Contains(second, ",search\n")) << second;
}

TEST(AutotuneEngineTest, AJobGoesOnWithoutTheFile) {
  EngineOptions options = Autotuned();
  options.autotune.log = testing::TempDir() + "/missing/log.csv";
  CapturedErrors errors;
  Job job(2, options);
  job.ForEach([](Rank& self, int) {
    for (int step = 0; step < 30; ++step) {
      ASSERT_TRUE(self.Run(Sum("x", {1})).ok());
    }
  });
  EXPECT_EQ(Count(errors.text(), "missing/log.csv' cannot be written"), 1u);
}

TEST(AutotuneEngineTest, OneRankHasNothingToTune) {
  Job job(1, Autotuned());
  for (int step = 0; step < 30; ++step) {
    ASSERT_TRUE(job[0].Run(Sum("x", {1})).ok());
  }
  EXPECT_EQ(job[0].counters().tunings, 0);
}

}  // namespace
}  // namespace keras_hvd
