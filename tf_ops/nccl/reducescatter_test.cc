// Reducescatter on GPUs: results against plain loops, and how it is asked for.
#include "tf_ops/nccl/reducescatter.h"

#include "tf_ops/collectives/parts.h"
#include "tf_ops/nccl/reduction.h"
#include "tf_ops/nccl/testing.h"

namespace keras_hvd::nccl {
namespace {

class ReducescatterTest : public testing::TestWithParam<int> {};

struct Tensor {
  DataType dtype;
  int64_t rows;
  int64_t row_elements;

  int64_t elements() const { return rows * row_elements; }
};

void CheckGroup(Rank* rank, const Reduction& reduction,
                const std::vector<Tensor>& tensors, uint64_t seed) {
  const int count = rank->communicator->count();
  const int self = rank->index();
  std::vector<cuda::Memory> inputs, outputs;
  ReducescatterOptions options = {reduction, {}};
  for (const Tensor& tensor : tensors) {
    const int64_t rows =
        PartStart(tensor.rows, self + 1, count) - PartStart(tensor.rows, self, count);
    inputs.push_back(rank->Input(Numbers(tensor.dtype, tensor.elements(), self, seed)));
    outputs.push_back(rank->Output(rows * tensor.row_elements * Bytes(tensor.dtype)));
    options.tensors.push_back({tensor.dtype, tensor.rows, tensor.row_elements,
                               inputs.back().data(), outputs.back().data()});
  }
  rank->Run([&] { return Reducescatter(options, rank->communicator.get()); });
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    std::vector<std::vector<char>> all;
    for (int member = 0; member < count; ++member) {
      all.push_back(Numbers(tensor.dtype, tensor.elements(), member, seed));
    }
    ExpectReduced(reduction, tensor.dtype, all,
                  PartStart(tensor.rows, self, count) * tensor.row_elements,
                  rank->Contents(outputs[i]));
  }
}

TEST_P(ReducescatterTest, EveryOpScaleAndType) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    Libraries libraries(seed);
    RunRanks(libraries, GetParam(), [&](Rank* rank) {
      for (const Reduction& reduction : SomeReductions()) {
        for (int type = 0; type < kReducedDataTypes; ++type) {
          const DataType dtype = static_cast<DataType>(type);
          if (!CanReduce(reduction, dtype, GetParam(), kAllTypes)) continue;
          CheckGroup(rank, reduction, {{dtype, 12, 7}, {dtype, 0, 3}, {dtype, 13, 5}},
                     seed);
        }
      }
    });
  }
}

TEST_P(ReducescatterTest, FewerRowsThanRanks) {
  for (int64_t rows = 1; rows < GetParam(); ++rows) {
    Libraries libraries(rows);
    RunRanks(libraries, GetParam(), [&](Rank* rank) {
      CheckGroup(rank, {ReduceOp::kSum}, {{DataType::kFloat32, rows, 3}}, rows);
    });
    EXPECT_EQ(libraries.CountCalls("ncclReduce"), rows * GetParam());
  }
}

TEST_P(ReducescatterTest, EvenPartsAreOneCall) {
  Libraries libraries(1);
  RunRanks(libraries, GetParam(), [&](Rank* rank) {
    CheckGroup(rank, {ReduceOp::kSum},
               {{DataType::kFloat32, 12, 3}, {DataType::kInt32, 24, 1}}, 1);
  });
  EXPECT_EQ(libraries.CountCalls("ncclReduceScatter"), 2 * GetParam());
  EXPECT_EQ(libraries.CountCalls("ncclReduce"), 0);
  EXPECT_EQ(libraries.CountCalls("ncclGroupStart"), GetParam());
}

TEST_P(ReducescatterTest, NothingOfNothing) {
  Libraries libraries(1);
  RunRanks(libraries, GetParam(), [&](Rank* rank) {
    CheckGroup(rank, {ReduceOp::kSum},
               {{DataType::kFloat32, 0, 3}, {DataType::kFloat32, 5, 0}}, 1);
  });
  EXPECT_EQ(libraries.CountCalls("ncclGroupStart"), 0);
}

INSTANTIATE_TEST_SUITE_P(Ranks, ReducescatterTest, testing::Range(1, 5));

}  // namespace
}  // namespace keras_hvd::nccl
