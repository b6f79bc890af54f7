// Allreduce on GPUs: results against plain loops, and how it is asked for.
#include "tf_ops/nccl/allreduce.h"

#include "tf_ops/nccl/reduction.h"
#include "tf_ops/nccl/testing.h"

namespace keras_hvd::nccl {
namespace {

class AllreduceTest : public testing::TestWithParam<int> {};

// One group of tensors of these types, as long as that.
void CheckGroup(Rank* rank, const Reduction& reduction,
                const std::vector<std::pair<DataType, int64_t>>& tensors, bool in_place,
                uint64_t seed) {
  const int count = rank->communicator->count();
  std::vector<cuda::Memory> inputs, outputs;
  AllreduceOptions options = {reduction, {}};
  for (const auto& [dtype, elements] : tensors) {
    inputs.push_back(rank->Input(Numbers(dtype, elements, rank->index(), seed)));
    if (!in_place) outputs.push_back(rank->Output(elements * Bytes(dtype)));
    options.tensors.push_back({dtype, elements, inputs.back().data(),
                               (in_place ? inputs : outputs).back().data()});
  }
  rank->Run([&] { return Allreduce(options, rank->communicator.get()); });
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [dtype, elements] = tensors[i];
    std::vector<std::vector<char>> all;
    for (int member = 0; member < count; ++member) {
      all.push_back(Numbers(dtype, elements, member, seed));
    }
    ExpectReduced(reduction, dtype, all, 0,
                  rank->Contents((in_place ? inputs : outputs)[i]));
  }
}

TEST_P(AllreduceTest, EveryOpScaleAndType) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    Libraries libraries(seed);
    RunRanks(libraries, GetParam(), [&](Rank* rank) {
      for (const Reduction& reduction : SomeReductions()) {
        for (int type = 0; type < kReducedDataTypes; ++type) {
          const DataType dtype = static_cast<DataType>(type);
          if (!CanReduce(reduction, dtype, GetParam(), kAllTypes)) continue;
          CheckGroup(rank, reduction, {{dtype, 1}, {dtype, 0}, {dtype, 333}},
                     type % 2 == 0, seed);
        }
      }
    });
  }
}

TEST_P(AllreduceTest, TypesInOneGroup) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Libraries libraries(seed);
    RunRanks(libraries, GetParam(), [&](Rank* rank) {
      CheckGroup(rank, {ReduceOp::kSum, 0.5, 1},
                 {{DataType::kFloat32, 100},
                  {DataType::kFloat16, 30},
                  {DataType::kFloat32, 7},
                  {DataType::kFloat64, 1000},
                  {DataType::kBfloat16, 1}},
                 seed % 2 == 0, seed);
    });
    EXPECT_EQ(libraries.CountCalls("ncclGroupStart"), GetParam());
    EXPECT_EQ(libraries.CountCalls("ncclGroupEnd"), GetParam());
    EXPECT_EQ(libraries.CountCalls("ncclAllReduce"), 5 * GetParam());
    EXPECT_EQ(libraries.CountCalls("ncclRedOpCreatePreMulSum"), 4 * GetParam());
  }
}

TEST_P(AllreduceTest, NothingOfNothing) {
  Libraries libraries(1);
  RunRanks(libraries, GetParam(), [&](Rank* rank) {
    CheckGroup(rank, {ReduceOp::kSum, 0.5, 1}, {}, true, 1);
    CheckGroup(rank, {ReduceOp::kSum, 0.5, 1}, {{DataType::kFloat32, 0}}, true, 1);
  });
  EXPECT_EQ(libraries.CountCalls("ncclGroupStart"), 0);
  EXPECT_EQ(libraries.CountCalls("ncclRedOpCreatePreMulSum"), 0);
}

INSTANTIATE_TEST_SUITE_P(Ranks, AllreduceTest, testing::Range(1, 5));

}  // namespace
}  // namespace keras_hvd::nccl
