// Adasum over ranks, sizes and types, against the recursion of its definition.
#include "tf_ops/collectives/adasum.h"

#include <cmath>

#include "tf_ops/collectives/numbers_testing.h"
#include "tf_ops/collectives/testing.h"

namespace keras_hvd {
namespace {

using Vector = std::vector<double>;

double Dot(const Vector& a, const Vector& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

Vector OfTwo(const Vector& a, const Vector& b) {
  const double of_a = Dot(a, a) > 0 ? 1 - Dot(a, b) / (2 * Dot(a, a)) : 1;
  const double of_b = Dot(b, b) > 0 ? 1 - Dot(a, b) / (2 * Dot(b, b)) : 1;
  Vector sum(a.size());
  for (size_t i = 0; i < a.size(); ++i) sum[i] = of_a * a[i] + of_b * b[i];
  return sum;
}

Vector Expected(const std::vector<Vector>& vectors) {
  if (vectors.size() == 1) return vectors.front();
  const auto half = vectors.begin() + vectors.size() / 2;
  return OfTwo(Expected({vectors.begin(), half}), Expected({half, vectors.end()}));
}

struct Shape {
  DataType dtype;
  int64_t elements;
};

using Tensors = std::vector<std::vector<char>>;

std::vector<Tensors> RandomTensors(int size, const std::vector<Shape>& group) {
  std::vector<Tensors> inputs(size);
  for (int rank = 0; rank < size; ++rank) {
    for (const auto& [dtype, elements] : group) {
      std::mt19937_64 random(rank * 7919 + elements);
      std::normal_distribution<double> normal(0.3);
      Vector numbers(elements);
      for (double& number : numbers) number = normal(random);
      inputs[rank].push_back(Encoded(dtype, numbers));
    }
  }
  return inputs;
}

// The outputs of all ranks. In place or not.
std::vector<Tensors> AdasumOf(Ranks* ranks, const std::vector<Shape>& group,
                              const std::vector<Tensors>& inputs, bool in_place,
                              double prescale = 1, double postscale = 1) {
  std::vector<Tensors> outputs = inputs;
  ranks->Run([&](int rank, Communicator* communicator) {
    AdasumOptions options;
    options.prescale = prescale;
    options.postscale = postscale;
    for (size_t i = 0; i < group.size(); ++i) {
      char* output = outputs[rank][i].data();
      const char* input = in_place ? output : inputs[rank][i].data();
      options.tensors.push_back({group[i].dtype, group[i].elements, input, output});
    }
    EXPECT_TRUE(Adasum(options, communicator));
  });
  return outputs;
}

// Against the definition; the scales are powers of two, which change no digits.
void CheckGroup(Ranks* ranks, const std::vector<Shape>& group, bool in_place,
                double prescale = 1, double postscale = 1) {
  const std::vector<Tensors> inputs = RandomTensors(ranks->size(), group);
  const std::vector<Tensors> outputs =
      AdasumOf(ranks, group, inputs, in_place, prescale, postscale);
  for (size_t i = 0; i < group.size(); ++i) {
    std::vector<Vector> vectors;
    for (const Tensors& of_rank : inputs) {
      vectors.push_back(Decoded(group[i].dtype, of_rank[i]));
    }
    const Vector expected = Expected(vectors);
    const Vector result = Decoded(group[i].dtype, outputs[0][i]);
    const double tolerance = Tolerance(group[i].dtype);
    for (size_t j = 0; j < expected.size(); ++j) {
      ASSERT_NEAR(result[j] / prescale / postscale, expected[j],
                  tolerance * (std::abs(expected[j]) + 1))
          << "element " << j << " of " << group[i].elements << " "
          << Name(group[i].dtype) << " on " << ranks->size() << " ranks";
    }
    for (const Tensors& of_rank : outputs) ASSERT_TRUE(of_rank[i] == outputs[0][i]);
  }
}

class AdasumTest : public testing::TestWithParam<int> {};

constexpr DataType kTypes[] = {DataType::kFloat16,    DataType::kBfloat16,
                               DataType::kFloat32,    DataType::kFloat64,
                               DataType::kFloat8E5m2, DataType::kFloat8E4m3fn};

TEST(CanAdasumTest, PowersOfTwoAlone) {
  for (int members : {1, 2, 4, 8, 64, 1024}) EXPECT_TRUE(CanAdasum(members));
  for (int members : {0, 3, 5, 6, 7, 12, 1023}) EXPECT_FALSE(CanAdasum(members));
}

TEST_P(AdasumTest, AllSizesAndTypes) {
  Ranks ranks(GetParam());
  for (DataType dtype : kTypes) {
    for (int64_t elements : {0, 1, 2, 3, 7, 8, 9, 100, 1023, 4096, 20011}) {
      CheckGroup(&ranks, {{dtype, elements}}, elements % 2 == 0);
    }
  }
}

TEST_P(AdasumTest, Scales) {
  Ranks ranks(GetParam());
  for (DataType dtype : kTypes) CheckGroup(&ranks, {{dtype, 501}}, true, 0.5, 4);
}

// Each tensor is a vector of its own, to the bit.
TEST_P(AdasumTest, AGroupGivesWhatItsTensorsGiveAlone) {
  Ranks ranks(GetParam());
  std::vector<Shape> group;
  std::mt19937 random(GetParam());
  for (int i = 0; i < 200; ++i) {
    group.push_back(
        {kTypes[random() % std::size(kTypes)], static_cast<int64_t>(random() % 300)});
  }
  CheckGroup(&ranks, group, false);
  const std::vector<Tensors> inputs = RandomTensors(GetParam(), group);
  const std::vector<Tensors> together = AdasumOf(&ranks, group, inputs, false);
  for (size_t i = 0; i < group.size(); i += 7) {
    std::vector<Tensors> one(GetParam());
    for (int rank = 0; rank < GetParam(); ++rank) one[rank] = {inputs[rank][i]};
    ASSERT_TRUE(AdasumOf(&ranks, {group[i]}, one, false)[0][0] == together[0][i]);
  }
}

TEST_P(AdasumTest, EqualVectorsAreAveragedAndZerosAddNothing) {
  Ranks ranks(GetParam());
  const std::vector<Shape> group = {{DataType::kFloat32, 4}};
  const std::vector<char> vector = Encoded(DataType::kFloat32, {1, -2, 0.5, 8});
  const std::vector<char> zeros = Encoded(DataType::kFloat32, {0, 0, 0, 0});
  std::vector<Tensors> inputs(GetParam(), Tensors{vector});
  EXPECT_EQ(AdasumOf(&ranks, group, inputs, false), inputs);
  inputs.assign(GetParam(), Tensors{zeros});
  EXPECT_EQ(AdasumOf(&ranks, group, inputs, false), inputs);
  inputs.back() = {vector};
  EXPECT_EQ(AdasumOf(&ranks, group, inputs, false),
            std::vector<Tensors>(GetParam(), Tensors{vector}));
}

TEST_P(AdasumTest, OrthogonalVectorsAreSummed) {
  Ranks ranks(GetParam());
  std::vector<Tensors> inputs(GetParam());
  Vector sum;
  for (int rank = 0; rank < GetParam(); ++rank) {
    Vector numbers(GetParam());
    numbers[rank] = rank + 3;
    inputs[rank] = {Encoded(DataType::kFloat64, numbers)};
    sum.push_back(rank + 3);
  }
  EXPECT_EQ(
      AdasumOf(&ranks, {{DataType::kFloat64, GetParam()}}, inputs, true),
      std::vector<Tensors>(GetParam(), Tensors{Encoded(DataType::kFloat64, sum)}));
}

INSTANTIATE_TEST_SUITE_P(Ranks, AdasumTest, testing::Values(1, 2, 4, 8));

}  // namespace
}  // namespace keras_hvd
