// The results of one reduction, bit for bit.
#include "tf_ops/collectives/reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace keras_hvd {
namespace {

template <typename T>
std::vector<T> ReduceVectors(const Reduction& reduction, DataType dtype,
                             const std::vector<std::vector<T>>& inputs) {
  std::vector<const void*> pointers;
  for (const std::vector<T>& input : inputs) pointers.push_back(input.data());
  std::vector<T> result(inputs.front().size());
  Reduce(reduction, dtype, pointers.data(), static_cast<int>(inputs.size()),
         static_cast<int64_t>(result.size()), result.data());
  return result;
}

Reduction Op(ReduceOp op, double prescale = 1, double postscale = 1) {
  return {op, prescale, postscale};
}

// The bits of a narrow type's numbers, by its definition.
struct NarrowType {
  DataType dtype;
  int exponent_bits;
  int mantissa_bits;
  // Otherwise the largest exponent has numbers too, and its largest mantissa is NaN.
  bool has_infinity = true;

  uint32_t sign() const { return 1u << (exponent_bits + mantissa_bits); }
  // The first bits, of those without a sign, that are no finite number.
  uint32_t end() const {
    return has_infinity ? sign() - (1u << mantissa_bits) : sign() - 1;
  }

  double Value(uint32_t bits) const {
    const double sign_of = (bits & sign()) != 0 ? -1 : 1;
    const int magnitude = static_cast<int>(bits & (sign() - 1));
    if (magnitude == static_cast<int>(end()) && has_infinity) {
      return sign_of * INFINITY;
    }
    if (magnitude >= static_cast<int>(end())) return std::nan("");
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = magnitude >> mantissa_bits;
    const double fraction =
        std::ldexp(magnitude & ((1 << mantissa_bits) - 1), -mantissa_bits);
    return exponent == 0 ? sign_of * std::ldexp(fraction, 1 - bias)
                         : sign_of * std::ldexp(1 + fraction, exponent - bias);
  }

  // The bits of the nearest number, the even ones of two: found by search, not by the
  // arithmetic under test.
  uint32_t Nearest(double value) const {
    const double magnitude = std::fabs(value);
    uint32_t low = 0, high = end();
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      (Value(middle) <= magnitude ? low : high) = middle;
    }
    // The step out of the range counts as one more of the last steps.
    const double above =
        high == end() ? 2 * Value(end() - 1) - Value(end() - 2) : Value(high);
    const double half = (Value(low) + above) / 2;
    const bool up = magnitude > half || (magnitude == half && (low & 1) != 0);
    return (up ? high : low) | (std::signbit(value) ? sign() : 0);
  }
};

constexpr NarrowType kFloat8E5m2 = {DataType::kFloat8E5m2, 5, 2};
constexpr NarrowType kFloat8E4m3fn = {DataType::kFloat8E4m3fn, 4, 3, false};

// Numbers of a narrow type, by their bits.
using Codes = std::vector<uint32_t>;

Codes ReduceNarrow(const Reduction& reduction, DataType dtype,
                   const std::vector<Codes>& inputs) {
  const auto reduce = [&](auto zero) {
    using T = decltype(zero);
    std::vector<std::vector<T>> narrow;
    for (const Codes& input : inputs) narrow.emplace_back(input.begin(), input.end());
    const std::vector<T> result = ReduceVectors<T>(reduction, dtype, narrow);
    return Codes(result.begin(), result.end());
  };
  return Bytes(dtype) == 1 ? reduce(uint8_t{0}) : reduce(uint16_t{0});
}

class NarrowFloats : public testing::TestWithParam<NarrowType> {
 protected:
  double ValueOf(uint32_t bits) const { return GetParam().Value(bits); }
  uint32_t Nearest(double value) const { return GetParam().Nearest(value); }
  Codes AllNumbers() const {
    Codes all(2 * GetParam().sign());
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
};

TEST_P(NarrowFloats, EveryNumberComesThroughUnchanged) {
  const Codes all = AllNumbers();
  const Codes result = ReduceNarrow(Op(ReduceOp::kSum), GetParam().dtype, {all});
  for (size_t i = 0; i < all.size(); ++i) {
    if (std::isnan(ValueOf(all[i]))) {
      EXPECT_TRUE(std::isnan(ValueOf(result[i]))) << i;
    } else {
      EXPECT_EQ(result[i], all[i]) << i;
    }
  }
}

TEST_P(NarrowFloats, SumsAreRoundedOnceToTheNearestEvenNumber) {
  std::mt19937 random(1);
  const uint32_t sign = GetParam().sign();
  std::vector<Codes> inputs(3, Codes(20000));
  for (size_t i = 0; i < inputs[0].size(); ++i) {
    // Numbers of like size, so that every bit of the sum counts; tiny ones as well.
    const uint32_t base = random() & (sign - 1);
    for (auto& input : inputs) {
      input[i] = ((base + random() % (sign >> 4)) & (2 * sign - 1)) ^
                 (random() & 1 ? sign : 0);
    }
  }
  const Codes result = ReduceNarrow(Op(ReduceOp::kSum), GetParam().dtype, inputs);
  int finite = 0;
  for (size_t i = 0; i < result.size(); ++i) {
    float sum = static_cast<float>(ValueOf(inputs[0][i]));
    sum += static_cast<float>(ValueOf(inputs[1][i]));
    sum += static_cast<float>(ValueOf(inputs[2][i]));
    if (std::isnan(sum)) {
      EXPECT_TRUE(std::isnan(ValueOf(result[i])));
    } else if (std::isinf(sum)) {
      EXPECT_EQ(result[i], GetParam().end() | (sum < 0 ? sign : 0));
    } else {
      ++finite;
      ASSERT_EQ(result[i], Nearest(sum)) << sum;
    }
  }
  EXPECT_GT(finite, 15000);
}

TEST_P(NarrowFloats, TiesAndOverflowAreRoundedAsTheHardwareDoes) {
  // Half of each number's distance to the next, added by a second rank.
  Codes numbers, halves;
  const uint32_t exponent_step = 1u << GetParam().mantissa_bits;
  const uint32_t first = (GetParam().mantissa_bits + 2) * exponent_step;
  for (uint32_t number = first; number < GetParam().end(); ++number) {
    numbers.push_back(number);
    halves.push_back((number & -exponent_step) -
                     (GetParam().mantissa_bits + 1) * exponent_step);
  }
  const Codes result =
      ReduceNarrow(Op(ReduceOp::kSum), GetParam().dtype, {numbers, halves});
  for (size_t i = 0; i < result.size(); ++i) {
    EXPECT_EQ(result[i], numbers[i] + (numbers[i] & 1)) << i;
  }
}

TEST_P(NarrowFloats, ResultsOutOfRangeAreWhatTheTypeHasForThem) {
  const uint32_t largest = GetParam().end() - 1, sign = GetParam().sign();
  const Codes result =
      ReduceNarrow(Op(ReduceOp::kSum), GetParam().dtype,
                   {{largest, largest | sign}, {largest, largest | sign}});
  EXPECT_EQ(result, (Codes{GetParam().end(), GetParam().end() | sign}));
  // Beyond the range of float32, in which it is computed.
  EXPECT_EQ(ReduceNarrow({ReduceOp::kSum, 3e38, 1e38}, GetParam().dtype, {{largest}}),
            Codes{GetParam().end()});
}

INSTANTIATE_TEST_SUITE_P(Types, NarrowFloats,
                         testing::Values(NarrowType{DataType::kFloat16, 5, 10},
                                         NarrowType{DataType::kBfloat16, 8, 7},
                                         kFloat8E5m2, kFloat8E4m3fn));

class Float8 : public NarrowFloats {};

// One number of every two, in both orders, reduced by each operation.
TEST_P(Float8, AllPairs) {
  std::vector<Codes> inputs(2);
  for (uint32_t a : AllNumbers()) {
    for (uint32_t b : AllNumbers()) inputs[0].push_back(a), inputs[1].push_back(b);
  }
  const auto check = [&](const Reduction& reduction, const auto& exact) {
    const Codes result = ReduceNarrow(reduction, GetParam().dtype, inputs);
    for (size_t i = 0; i < result.size(); ++i) {
      const double expected = exact(ValueOf(inputs[0][i]), ValueOf(inputs[1][i]));
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(ValueOf(result[i]))) << i;
      } else {
        ASSERT_EQ(result[i], Nearest(expected)) << i;
      }
    }
  };
  check(Op(ReduceOp::kSum), [](double a, double b) { return a + b; });
  check(Op(ReduceOp::kAverage), [](double a, double b) { return (a + b) / 2; });
  check(Op(ReduceOp::kProduct), [](double a, double b) { return a * b; });
  check(Op(ReduceOp::kMin), [](double a, double b) {
    return std::isnan(a) || std::isnan(b) ? std::nan("") : (b < a ? b : a);
  });
  check(Op(ReduceOp::kMax), [](double a, double b) {
    return std::isnan(a) || std::isnan(b) ? std::nan("") : (a < b ? b : a);
  });
}

INSTANTIATE_TEST_SUITE_P(Types, Float8, testing::Values(kFloat8E5m2, kFloat8E4m3fn));

TEST(Reduce, FloatsAreSummedInTheOrderOfTheInputs) {
  const std::vector<std::vector<float>> inputs = {{1e8f}, {1.0f}, {-1e8f}, {1.0f}};
  EXPECT_EQ(ReduceVectors(Op(ReduceOp::kSum), DataType::kFloat32, inputs)[0], 1.0f);
}

TEST(Reduce, AveragesOfIntegersAreExactAndTowardsZero) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(ReduceVectors<int64_t>(Op(ReduceOp::kAverage), DataType::kInt64,
                                   {{most, -3, 3}, {most, -4, 4}, {most - 3, 0, 0}}),
            (std::vector<int64_t>{most - 1, -2, 2}));
  EXPECT_EQ(ReduceVectors<int8_t>(Op(ReduceOp::kAverage), DataType::kInt8,
                                  {{100, -128}, {100, -128}}),
            (std::vector<int8_t>{100, -128}));
  EXPECT_EQ(
      ReduceVectors<uint8_t>(Op(ReduceOp::kAverage), DataType::kUint8, {{255}, {254}}),
      (std::vector<uint8_t>{254}));
  EXPECT_EQ(ReduceVectors<uint32_t>(Op(ReduceOp::kAverage), DataType::kUint32,
                                    {{~0u, 1u << 31}, {~0u, (1u << 31) + 3}}),
            (std::vector<uint32_t>{~0u, (1u << 31) + 1}));
  const uint64_t all = ~uint64_t{0}, half = uint64_t{1} << 63;
  EXPECT_EQ(ReduceVectors<uint64_t>(Op(ReduceOp::kAverage), DataType::kUint64,
                                    {{all, half, all}, {all, half + 3, 0}}),
            (std::vector<uint64_t>{all, half + 1, half - 1}));
}

TEST(Reduce, TheUpperHalfOfUnsignedIntegersIsTheLarger) {
  const std::vector<std::vector<uint32_t>> small = {{1u << 31, ~0u}, {7, 0}};
  EXPECT_EQ(ReduceVectors(Op(ReduceOp::kMax), DataType::kUint32, small),
            (std::vector<uint32_t>{1u << 31, ~0u}));
  EXPECT_EQ(ReduceVectors(Op(ReduceOp::kMin), DataType::kUint32, small),
            (std::vector<uint32_t>{7, 0}));
  const uint64_t half = uint64_t{1} << 63;
  const std::vector<std::vector<uint64_t>> large = {{half, ~uint64_t{0}}, {7, 0}};
  EXPECT_EQ(ReduceVectors(Op(ReduceOp::kMax), DataType::kUint64, large),
            (std::vector<uint64_t>{half, ~uint64_t{0}}));
  EXPECT_EQ(ReduceVectors(Op(ReduceOp::kMin), DataType::kUint64, large),
            (std::vector<uint64_t>{7, 0}));
}

TEST(Reduce, SumsAndProductsOfIntegersWrapAround) {
  EXPECT_EQ(ReduceVectors<int32_t>(Op(ReduceOp::kSum), DataType::kInt32,
                                   {{std::numeric_limits<int32_t>::max()}, {1}}),
            (std::vector<int32_t>{std::numeric_limits<int32_t>::min()}));
  EXPECT_EQ(
      ReduceVectors<int8_t>(Op(ReduceOp::kProduct), DataType::kInt8, {{-100}, {3}}),
      (std::vector<int8_t>{static_cast<int8_t>(-300)}));
  EXPECT_EQ(
      ReduceVectors<uint32_t>(Op(ReduceOp::kSum), DataType::kUint32, {{~0u}, {3}}),
      (std::vector<uint32_t>{2}));
  EXPECT_EQ(ReduceVectors<uint64_t>(Op(ReduceOp::kProduct), DataType::kUint64,
                                    {{(uint64_t{1} << 63) + 1}, {3}}),
            (std::vector<uint64_t>{(uint64_t{1} << 63) + 3}));
}

TEST(Reduce, ScaledIntegersAreTruncatedAndStayInTheirRange) {
  EXPECT_EQ(ReduceVectors<int32_t>(Op(ReduceOp::kSum, 0.5, 3), DataType::kInt32,
                                   {{3, -3}, {5, -5}}),
            (std::vector<int32_t>{9, -9}));
  EXPECT_EQ(ReduceVectors<int32_t>(Op(ReduceOp::kAverage, 0.5), DataType::kInt32,
                                   {{3, -3}, {5, -5}}),
            (std::vector<int32_t>{1, -1}));
  EXPECT_EQ(ReduceVectors<int8_t>(Op(ReduceOp::kSum, 2), DataType::kInt8,
                                  {{100}, {-100}, {1}}),
            (std::vector<int8_t>{1}));
  EXPECT_EQ(ReduceVectors<uint8_t>(Op(ReduceOp::kSum, 1, 10), DataType::kUint8,
                                   {{200}, {200}}),
            (std::vector<uint8_t>{255}));
  EXPECT_EQ(ReduceVectors<uint32_t>(Op(ReduceOp::kSum, 0.5), DataType::kUint32,
                                    {{1u << 31}, {(1u << 31) + 4}}),
            (std::vector<uint32_t>{(1u << 31) + 2}));
  EXPECT_EQ(ReduceVectors<uint64_t>(Op(ReduceOp::kSum, -1, 1), DataType::kUint64,
                                    {{~uint64_t{0}}, {1}}),
            (std::vector<uint64_t>{0}));
  EXPECT_EQ(ReduceVectors<uint64_t>(Op(ReduceOp::kSum, 2), DataType::kUint64,
                                    {{uint64_t{1} << 63}, {1}}),
            (std::vector<uint64_t>{~uint64_t{0}}));
}

TEST(Reduce, ScaledIntegersAreNumbersWhateverOverflows) {
  const std::vector<int64_t> most = {std::numeric_limits<int64_t>::max()};
  std::vector<std::vector<int64_t>> inputs(20, most);
  EXPECT_EQ(ReduceVectors<int64_t>(Op(ReduceOp::kProduct, 2), DataType::kInt64, inputs),
            most);
  inputs.push_back({0});
  EXPECT_EQ(ReduceVectors<int64_t>(Op(ReduceOp::kProduct, 2), DataType::kInt64, inputs),
            (std::vector<int64_t>{0}));
  EXPECT_EQ(ReduceVectors<int64_t>(Op(ReduceOp::kSum, 1e308, 1e308), DataType::kInt64,
                                   {{2}, {-2}, {0}}),
            (std::vector<int64_t>{0}));
}

TEST(Reduce, IntegersTakeNoInfiniteScales) {
  for (const double infinity : {INFINITY, -INFINITY}) {
    for (const DataType dtype : {DataType::kUint8, DataType::kInt64}) {
      EXPECT_FALSE(Supports(Op(ReduceOp::kSum, infinity), dtype));
      EXPECT_FALSE(Supports(Op(ReduceOp::kMax, 1, infinity), dtype));
    }
    EXPECT_TRUE(Supports(Op(ReduceOp::kSum, infinity), DataType::kFloat16));
  }
}

TEST(Reduce, ScalesApplyBeforeAndAfter) {
  EXPECT_EQ(ReduceVectors<float>(Op(ReduceOp::kProduct, 2, 10), DataType::kFloat32,
                                 {{1.5f}, {2.0f}}),
            (std::vector<float>{120.0f}));
  EXPECT_EQ(ReduceVectors<double>(Op(ReduceOp::kAverage, 2, 10), DataType::kFloat64,
                                  {{1.5}, {2.5}}),
            (std::vector<double>{40.0}));
}

TEST(Reduce, NanOfAnyRankIsNanOfTheResult) {
  const float nan = std::nanf("");
  for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kSum}) {
    const auto result = ReduceVectors<float>(
        Op(op), DataType::kFloat32, {{nan, 1, 1, 5}, {1, nan, 1, 6}, {1, 1, nan, 7}});
    EXPECT_TRUE(std::isnan(result[0]) && std::isnan(result[1]) &&
                std::isnan(result[2]));
    EXPECT_FALSE(std::isnan(result[3]));
  }
}

TEST(Reduce, TruthValuesAreJoinedByAndAndOr) {
  const std::vector<std::vector<uint8_t>> inputs = {{0, 0, 1, 1}, {0, 1, 0, 1}};
  EXPECT_EQ(ReduceVectors(Op(ReduceOp::kMin), DataType::kBool, inputs),
            (std::vector<uint8_t>{0, 0, 0, 1}));
  EXPECT_EQ(ReduceVectors(Op(ReduceOp::kProduct), DataType::kBool, inputs),
            (std::vector<uint8_t>{0, 0, 0, 1}));
  EXPECT_EQ(ReduceVectors(Op(ReduceOp::kMax), DataType::kBool, inputs),
            (std::vector<uint8_t>{0, 1, 1, 1}));
  EXPECT_FALSE(Supports(Op(ReduceOp::kSum), DataType::kBool));
  EXPECT_FALSE(Supports(Op(ReduceOp::kAverage), DataType::kBool));
  EXPECT_FALSE(Supports(Op(ReduceOp::kMin, 2), DataType::kBool));
}

// Random bits are numbers of all kinds, subnormal ones, infinities and NaNs among them.
std::vector<char> RandomNumbers(int64_t bytes, DataType dtype, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<char> numbers(bytes);
  for (char& byte : numbers) {
    byte = static_cast<char>(dtype == DataType::kBool ? random() & 1 : random());
  }
  return numbers;
}

// Whether two results are the same bits, or both NaN.
bool SameNumbers(DataType dtype, const std::vector<char>& one,
                 const std::vector<char>& other) {
  const auto same = [&](auto zero, const auto& is_nan) {
    using T = decltype(zero);
    const auto* a = reinterpret_cast<const T*>(one.data());
    const auto* b = reinterpret_cast<const T*>(other.data());
    for (size_t i = 0; i < one.size() / sizeof(T); ++i) {
      if (memcmp(a + i, b + i, sizeof(T)) == 0) continue;
      if (!is_nan(a[i]) || !is_nan(b[i])) return false;
    }
    return true;
  };
  switch (dtype) {
    case DataType::kFloat32:
      return same(0.0f, [](float value) { return std::isnan(value); });
    case DataType::kFloat64:
      return same(0.0, [](double value) { return std::isnan(value); });
    case DataType::kFloat16:
      return same(uint16_t{0}, [](uint16_t bits) { return (bits & 0x7FFF) > 0x7C00; });
    case DataType::kBfloat16:
      return same(uint16_t{0}, [](uint16_t bits) { return (bits & 0x7FFF) > 0x7F80; });
    case DataType::kFloat8E5m2:
      return same(uint8_t{0}, [](uint8_t bits) { return (bits & 0x7F) > 0x7C; });
    case DataType::kFloat8E4m3fn:
      return same(uint8_t{0}, [](uint8_t bits) { return (bits & 0x7F) == 0x7F; });
    default: return one == other;
  }
}

TEST(Reduce, EveryInstructionSetGivesTheSameBits) {
  constexpr int64_t kElements = 2500;  // several blocks, the last one odd
  for (int type = 0; type < kReducedDataTypes; ++type) {
    const DataType dtype = static_cast<DataType>(type);
    const int64_t bytes = kElements * Bytes(dtype);
    for (int op = 0; op < kElementReduceOps; ++op) {
      for (int count : {1, 2, 3, 4, 7}) {
        for (double scale : {1.0, 0.3}) {
          const Reduction reduction = {static_cast<ReduceOp>(op), scale, 1 / scale};
          if (!Supports(reduction, dtype)) continue;
          std::vector<std::vector<char>> inputs;
          std::vector<const void*> pointers;
          for (int i = 0; i < count; ++i) {
            inputs.push_back(RandomNumbers(bytes, dtype, 100 * type + i));
          }
          for (const auto& input : inputs) pointers.push_back(input.data());
          std::vector<char> expected(bytes);
          Reduce(reduction, dtype, pointers.data(), count, kElements, expected.data(),
                 InstructionSet::kBaseline);
          for (InstructionSet instructions : InstructionSets()) {
            std::vector<char> result(bytes);
            Reduce(reduction, dtype, pointers.data(), count, kElements, result.data(),
                   instructions);
            ASSERT_TRUE(SameNumbers(dtype, result, expected))
                << Name(reduction.op) << " of " << count << " " << Name(dtype)
                << ", scale " << scale << ", instructions "
                << static_cast<int>(instructions);
          }
        }
      }
    }
  }
}

TEST(Reduce, TheResultMayBeAnyOfTheInputs) {
  for (int place : {0, 1, 2}) {
    std::vector<std::vector<float>> inputs(3, std::vector<float>(5000));
    for (size_t i = 0; i < 5000; ++i) {
      for (int rank = 0; rank < 3; ++rank)
        inputs[rank][i] = static_cast<float>(i + rank);
    }
    const std::vector<const void*> pointers = {inputs[0].data(), inputs[1].data(),
                                               inputs[2].data()};
    Reduce(Op(ReduceOp::kSum), DataType::kFloat32, pointers.data(), 3, 5000,
           inputs[place].data());
    for (size_t i = 0; i < 5000; ++i) EXPECT_EQ(inputs[place][i], 3.0f * i + 3);
  }
}

// Ranks, elements, and how far the output lies behind a cache line, in elements.
template <typename T>
void CheckBothPlaces(DataType dtype, const Reduction& reduction, int count,
                     int64_t elements, int64_t shift) {
  std::mt19937 random(count * 7 + elements);
  std::vector<std::vector<T>> inputs(count, std::vector<T>(elements));
  std::vector<const void*> pointers;
  for (std::vector<T>& input : inputs) {
    for (T& value : input) value = static_cast<T>(random()) / 3 - static_cast<T>(5e8);
    pointers.push_back(input.data());
  }
  std::vector<T> expected(elements);
  Reduce(reduction, dtype, pointers.data(), count, elements, expected.data(),
         InstructionSet::kBaseline);
  for (InstructionSet instructions : InstructionSets()) {
    for (int kind = 0; kind < kStoresKinds; ++kind) {
      alignas(64) T exchange[600] = {};
      alignas(64) T output[600] = {};
      const bool done = ReduceToBoth(reduction, dtype, pointers.data(), count, elements,
                                     static_cast<Stores>(kind), exchange,
                                     output + shift, instructions);
      StoreFence();
      const bool possible = shift == 0 || kind == static_cast<int>(Stores::kOrdinary);
      ASSERT_EQ(done, possible);
      if (!done) continue;
      // Bit by bit: a NaN would not be equal to itself.
      const auto has_expected = [&](const T* given) {
        return elements == 0 ||
               memcmp(given, expected.data(), elements * sizeof(T)) == 0;
      };
      ASSERT_TRUE(has_expected(exchange));
      ASSERT_TRUE(has_expected(output + shift));
      ASSERT_EQ(exchange[elements], 0);
      ASSERT_EQ(output[shift + elements], 0);
    }
  }
}

TEST(ReduceToBoth, GivesTheBitsOfReduceTwice) {
  const std::vector<Reduction> reductions = {Op(ReduceOp::kSum), Op(ReduceOp::kAverage),
                                             Op(ReduceOp::kSum, 0.3, 7)};
  for (const Reduction& reduction : reductions) {
    for (int count = 1; count <= 5; ++count) {
      for (int64_t elements : {0, 1, 3, 15, 16, 17, 64, 500}) {
        for (int64_t shift : {0, 1}) {
          CheckBothPlaces<float>(DataType::kFloat32, reduction, count, elements, shift);
          CheckBothPlaces<double>(DataType::kFloat64, reduction, count, elements,
                                  shift);
        }
      }
    }
  }
}

TEST(ReduceToBoth, TheOutputMayBeAnInput) {
  alignas(64) float output[100], exchange[100];
  std::vector<float> other(100, 2);
  for (int kind = 0; kind < kStoresKinds; ++kind) {
    std::fill(output, output + 100, 1.0f);
    const void* inputs[] = {other.data(), output};
    ASSERT_TRUE(ReduceToBoth(Op(ReduceOp::kSum), DataType::kFloat32, inputs, 2, 100,
                             static_cast<Stores>(kind), exchange, output));
    StoreFence();
    for (int i = 0; i < 100; ++i) ASSERT_EQ(output[i] + exchange[i], 6);
  }
}

TEST(ReduceToBoth, LeavesTheRestToReduce) {
  char bytes[64] = {};
  const void* inputs[] = {bytes};
  for (int dtype = 0; dtype < kReducedDataTypes; ++dtype) {
    for (int op = 0; op < kReduceOps; ++op) {
      const auto type = static_cast<DataType>(dtype);
      const auto operation = static_cast<ReduceOp>(op);
      const bool adds = operation == ReduceOp::kSum || operation == ReduceOp::kAverage;
      const bool is_float = type == DataType::kFloat32 || type == DataType::kFloat64;
      EXPECT_EQ(ReduceToBoth(Op(operation), type, inputs, 1, 0, Stores::kOrdinary,
                             bytes, bytes),
                adds && is_float);
    }
  }
}

}  // namespace
}  // namespace keras_hvd
