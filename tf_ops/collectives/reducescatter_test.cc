// Reducescatter over ranks, sizes, types and groups.
#include "tf_ops/collectives/reducescatter.h"

#include "tf_ops/collectives/parts.h"
#include "tf_ops/collectives/testing.h"

namespace keras_hvd {
namespace {

struct Shape {
  DataType dtype;
  int64_t rows;
  int64_t row_elements;
};

// Reduced as one group; checked against Reduce itself, which has tests of its own, on
// the whole tensors.
void CheckGroup(Ranks* ranks, const Reduction& reduction,
                const std::vector<Shape>& group) {
  const int size = ranks->size();
  std::vector<std::vector<std::vector<char>>> inputs(size), outputs(size);
  for (int rank = 0; rank < size; ++rank) {
    for (const auto& [dtype, rows, row_elements] : group) {
      const int64_t row_bytes = row_elements * Bytes(dtype);
      const int64_t own = PartStart(rows, rank + 1, size) - PartStart(rows, rank, size);
      inputs[rank].push_back(RandomBytes(rows * row_bytes, rank * 7919 + rows));
      outputs[rank].emplace_back(own * row_bytes);
      if (dtype != DataType::kBool) continue;
      for (char& byte : inputs[rank].back()) byte &= 1;
    }
  }
  ranks->Run([&](int rank, Communicator* communicator) {
    ReducescatterOptions options;
    options.reduction = reduction;
    for (size_t i = 0; i < group.size(); ++i) {
      options.tensors.push_back({group[i].dtype, group[i].rows, group[i].row_elements,
                                 inputs[rank][i].data(), outputs[rank][i].data()});
    }
    EXPECT_TRUE(Reducescatter(options, communicator));
  });
  for (size_t i = 0; i < group.size(); ++i) {
    const auto [dtype, rows, row_elements] = group[i];
    std::vector<const void*> pointers;
    for (int rank = 0; rank < size; ++rank) pointers.push_back(inputs[rank][i].data());
    std::vector<char> expected(rows * row_elements * Bytes(dtype)), joined;
    Reduce(reduction, dtype, pointers.data(), size, rows * row_elements,
           expected.data());
    for (int rank = 0; rank < size; ++rank) {
      joined.insert(joined.end(), outputs[rank][i].begin(), outputs[rank][i].end());
    }
    ASSERT_TRUE(joined == expected)
        << Name(reduction.op) << " of " << rows << " rows of " << row_elements << " "
        << Name(dtype) << " on " << size << " ranks";
  }
}

class ReducescatterTest : public testing::TestWithParam<int> {};

TEST(PartStartTest, TheFirstGetOneMoreWhereItDoesNotDivide) {
  for (int members = 1; members < 6; ++members) {
    for (int64_t rows = 0; rows < 20; ++rows) {
      EXPECT_EQ(PartStart(rows, 0, members), 0);
      EXPECT_EQ(PartStart(rows, members, members), rows);
      for (int member = 0; member < members; ++member) {
        const int64_t own =
            PartStart(rows, member + 1, members) - PartStart(rows, member, members);
        EXPECT_EQ(own, rows / members + (member < rows % members ? 1 : 0));
      }
    }
  }
}

TEST_P(ReducescatterTest, AllSizes) {
  Ranks ranks(GetParam());
  for (int64_t rows : {0, 1, 2, 3, 4, 5, 17, 64, 1000, 4096, 10007}) {
    for (int64_t row_elements : {0, 1, 3, 16}) {
      CheckGroup(&ranks, {ReduceOp::kSum}, {{DataType::kInt32, rows, row_elements}});
    }
  }
}

TEST_P(ReducescatterTest, AllTypesAndReductions) {
  Ranks ranks(GetParam());
  for (int dtype = 0; dtype < kReducedDataTypes; ++dtype) {
    for (int op = 0; op < kElementReduceOps; ++op) {
      for (double scale : {1.0, 0.5}) {
        const Reduction reduction = {static_cast<ReduceOp>(op), scale, 1 / scale};
        if (!Supports(reduction, static_cast<DataType>(dtype))) continue;
        CheckGroup(&ranks, reduction, {{static_cast<DataType>(dtype), 301, 11}});
      }
    }
  }
}

TEST_P(ReducescatterTest, GroupsOfMixedTypesAndSizes) {
  Ranks ranks(GetParam());
  std::mt19937 random(GetParam());
  for (int round = 0; round < 20; ++round) {
    std::vector<Shape> group;
    for (unsigned i = 0; i < 1 + random() % 30; ++i) {
      const int64_t most = random() % 3 == 0 ? 500 : 10;
      group.push_back({RandomNumberType(&random), static_cast<int64_t>(random() % most),
                       static_cast<int64_t>(random() % 12)});
    }
    CheckGroup(&ranks, {ReduceOp::kAverage}, group);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, ReducescatterTest, testing::Range(1, 6));

}  // namespace
}  // namespace keras_hvd
