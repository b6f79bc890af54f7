// Allgather on GPUs, of even and uneven parts.
#include "tf_ops/nccl/allgather.h"

#include <random>

#include "tf_ops/nccl/testing.h"

namespace keras_hvd::nccl {
namespace {

class AllgatherTest : public testing::TestWithParam<int> {};

struct Tensor {
  int64_t row_bytes;
  std::vector<int64_t> rows;
};

std::vector<char> PartOf(const Tensor& tensor, int member) {
  return Numbers(DataType::kUint8, tensor.rows[member] * tensor.row_bytes, member,
                 tensor.row_bytes);
}

void CheckGroup(Rank* rank, const std::vector<Tensor>& tensors) {
  std::vector<cuda::Memory> inputs, outputs;
  std::vector<std::vector<char>> expected;
  AllgatherOptions options;
  for (const Tensor& tensor : tensors) {
    std::vector<char>& all = expected.emplace_back();
    for (int member = 0; member < rank->communicator->count(); ++member) {
      const std::vector<char> part = PartOf(tensor, member);
      all.insert(all.end(), part.begin(), part.end());
    }
    inputs.push_back(rank->Input(PartOf(tensor, rank->index())));
    outputs.push_back(rank->Output(all.size()));
    options.tensors.push_back(
        {inputs.back().data(), outputs.back().data(), tensor.row_bytes, tensor.rows});
  }
  rank->Run([&] { return Allgather(options, rank->communicator.get()); });
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(rank->Contents(outputs[i]) == expected[i]) << "tensor " << i;
  }
}

TEST_P(AllgatherTest, GroupsOfUnevenParts) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    std::mt19937 random(seed);
    std::vector<Tensor> tensors(1 + random() % 8);
    for (Tensor& tensor : tensors) {
      tensor.row_bytes = random() % 20;
      tensor.rows.resize(GetParam());
      for (int64_t& rows : tensor.rows) rows = random() % 2 * (random() % 50);
    }
    Libraries libraries(seed);
    RunRanks(libraries, GetParam(), [&](Rank* rank) { CheckGroup(rank, tensors); });
    EXPECT_LE(libraries.CountCalls("ncclGroupStart"), GetParam());
  }
}

TEST_P(AllgatherTest, EvenPartsAreOneCall) {
  Libraries libraries(3);
  const std::vector<int64_t> rows(GetParam(), 5);
  RunRanks(libraries, GetParam(),
           [&](Rank* rank) { CheckGroup(rank, {{4, rows}, {0, rows}, {7, rows}}); });
  EXPECT_EQ(libraries.CountCalls("ncclAllGather"), 2 * GetParam());
  EXPECT_EQ(libraries.CountCalls("ncclBroadcast"), 0);
  EXPECT_EQ(libraries.CountCalls("ncclGroupStart"), GetParam());
}

TEST_P(AllgatherTest, EverythingFromOne) {
  for (int member = 0; member < GetParam(); ++member) {
    std::vector<int64_t> rows(GetParam(), 0);
    rows[member] = 100;
    Libraries libraries(member);
    RunRanks(libraries, GetParam(), [&](Rank* rank) { CheckGroup(rank, {{8, rows}}); });
    // One rank alone has even parts.
    EXPECT_EQ(libraries.CountCalls("ncclBroadcast"), GetParam() > 1 ? GetParam() : 0);
  }
}

TEST_P(AllgatherTest, NothingOfNothing) {
  Libraries libraries(1);
  RunRanks(libraries, GetParam(), [&](Rank* rank) {
    CheckGroup(rank, {{8, std::vector<int64_t>(GetParam(), 0)}});
  });
  EXPECT_EQ(libraries.CountCalls("ncclGroupStart"), 0);
}

INSTANTIATE_TEST_SUITE_P(Ranks, AllgatherTest, testing::Range(1, 5));

}  // namespace
}  // namespace keras_hvd::nccl
