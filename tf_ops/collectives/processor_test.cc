// A thread's floating-point environment while another one is put aside.
#include "tf_ops/collectives/processor.h"

#include <gtest/gtest.h>

#include <cfenv>
#include <limits>

namespace keras_hvd {
namespace {

// Not by the compiler, which knows only one environment.
float Sum(float a, float b) {
  volatile float first = a, second = b;
  return first + second;
}

TEST(StandardFloatingPoint, RoundsToNearestAndGivesBackWhatWasThere) {
  constexpr float kLittle = std::numeric_limits<float>::epsilon() / 4;
  ASSERT_EQ(fesetround(FE_UPWARD), 0);
  ASSERT_GT(Sum(1, kLittle), 1);
  {
    const StandardFloatingPoint floating_point;
    EXPECT_EQ(Sum(1, kLittle), 1);
  }
  EXPECT_GT(Sum(1, kLittle), 1);
  ASSERT_EQ(fesetround(FE_TONEAREST), 0);
}

TEST(InstructionSets, HaveTheBaselineFirstAndTheBestOneLast) {
  const std::vector<InstructionSet> sets = InstructionSets();
  EXPECT_EQ(sets.front(), InstructionSet::kBaseline);
  EXPECT_EQ(sets.back(), BestInstructionSet());
}

}  // namespace
}  // namespace keras_hvd
