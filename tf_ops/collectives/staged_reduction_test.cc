// StagedReduction: the places of reductions and roundings.
#include "tf_ops/collectives/staged_reduction.h"

#include <gtest/gtest.h>

#include "tf_ops/collectives/number.h"

namespace keras_hvd {
namespace {

template <typename T>
std::vector<T> InStages(const Reduction& whole, DataType dtype,
                        const std::vector<std::vector<T>>& inputs,
                        const std::vector<int>& hosts) {
  std::vector<const void*> addresses;
  for (const std::vector<T>& input : inputs) addresses.push_back(input.data());
  std::vector<T> result(inputs.front().size());
  ReduceInStages(whole, dtype, addresses, hosts, result.size(), result.data());
  return result;
}

// 2^24 + 1 is not a float32, so the order of sums shows.
TEST(StagedReductionTest, HostsAreReducedFirstAndTakenInTheirOrder) {
  const float large = 1 << 24;
  const std::vector<std::vector<float>> inputs = {{large}, {1}, {1}, {-large}};
  const auto sum = [&](const std::vector<int>& hosts) {
    return InStages<float>({}, DataType::kFloat32, inputs, hosts).front();
  };
  EXPECT_EQ(sum({0, 0, 0, 0}), 0);
  EXPECT_EQ(sum({}), 0);
  EXPECT_EQ(sum({0, 1, 1, 0}), 2);
  EXPECT_EQ(sum({0, 1, 1, 1}), 2);
  EXPECT_EQ(sum({0, 2, 3, 1}), 2);
}

TEST(StagedReductionTest, ScalesApplyOnce) {
  const Reduction whole = {ReduceOp::kAverage, 3, 5};
  const std::vector<std::vector<double>> inputs = {{1}, {2}, {9}};
  for (const std::vector<int>& hosts :
       {std::vector<int>{0, 0, 0}, {0, 0, 1}, {0, 1, 2}}) {
    EXPECT_DOUBLE_EQ(InStages<double>(whole, DataType::kFloat64, inputs, hosts).front(),
                     60);
  }
}

TEST(StagedReductionTest, IntegerAveragesAreExact) {
  const std::vector<std::vector<int8_t>> inputs = {{127}, {127}, {-127}, {2}};
  const Reduction average = {ReduceOp::kAverage, 1, 1};
  EXPECT_EQ(InStages<int8_t>(average, DataType::kInt8, inputs, {0, 0, 1, 1}).front(),
            32);
}

TEST(StagedReductionTest, AHostsSumMayExceedWhatItsAverageHasToFit) {
  Float16 large;
  Narrow(60000.0f, &large);
  const std::vector<std::vector<Float16>> inputs(4, {large});
  const Reduction average = {ReduceOp::kAverage, 1, 1};
  const auto result =
      InStages<Float16>(average, DataType::kFloat16, inputs, {0, 0, 1, 1});
  EXPECT_EQ(Widen(result.front()), Widen(large));
}

}  // namespace
}  // namespace keras_hvd
