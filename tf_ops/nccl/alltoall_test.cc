// Alltoall on GPUs, of even and uneven parts.
#include "tf_ops/nccl/alltoall.h"

#include <random>

#include "tf_ops/nccl/testing.h"

namespace keras_hvd::nccl {
namespace {

class AlltoallTest : public testing::TestWithParam<int> {};

using Splits = std::vector<std::vector<int64_t>>;  // by sender and receiver

std::vector<char> PartOf(int sender, int receiver, int64_t bytes) {
  return Numbers(DataType::kUint8, bytes, sender * 5 + receiver, bytes);
}

void CheckAlltoall(Rank* rank, const Splits& splits, int64_t row_bytes) {
  const int self = rank->index();
  AlltoallOptions options = {nullptr, nullptr, row_bytes, splits[self], {}};
  std::vector<char> input, expected;
  for (int member = 0; member < rank->communicator->count(); ++member) {
    options.received.push_back(splits[member][self]);
    const std::vector<char> to = PartOf(self, member, splits[self][member] * row_bytes);
    input.insert(input.end(), to.begin(), to.end());
    const std::vector<char> from =
        PartOf(member, self, splits[member][self] * row_bytes);
    expected.insert(expected.end(), from.begin(), from.end());
  }
  const cuda::Memory sent = rank->Input(input);
  const cuda::Memory received = rank->Output(expected.size());
  options.input = sent.data();
  options.output = received.data();
  rank->Run([&] { return Alltoall(options, rank->communicator.get()); });
  EXPECT_TRUE(rank->Contents(received) == expected) << self;
}

TEST_P(AlltoallTest, UnevenParts) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    std::mt19937 random(seed);
    Splits splits(GetParam(), std::vector<int64_t>(GetParam()));
    for (std::vector<int64_t>& sent : splits) {
      for (int64_t& rows : sent) rows = random() % 3 == 0 ? 0 : random() % 50;
    }
    const int64_t row_bytes = random() % 20;
    Libraries libraries(seed);
    RunRanks(libraries, GetParam(),
             [&](Rank* rank) { CheckAlltoall(rank, splits, row_bytes); });
    EXPECT_LE(libraries.CountCalls("ncclGroupStart"), GetParam());
  }
}

TEST_P(AlltoallTest, WhoMovesNothingAsksForNothing) {
  Libraries libraries(1);
  const Splits splits(GetParam(), std::vector<int64_t>(GetParam(), 0));
  RunRanks(libraries, GetParam(), [&](Rank* rank) { CheckAlltoall(rank, splits, 4); });
  EXPECT_EQ(libraries.CountCalls("ncclGroupStart"), 0);
}

// The last one alone sends, to the first one alone.
TEST_P(AlltoallTest, FromOneToOne) {
  Libraries libraries(1);
  Splits splits(GetParam(), std::vector<int64_t>(GetParam(), 0));
  splits.back().front() = 10;
  RunRanks(libraries, GetParam(), [&](Rank* rank) { CheckAlltoall(rank, splits, 4); });
  EXPECT_EQ(libraries.CountCalls("ncclSend"), 1);
  EXPECT_EQ(libraries.CountCalls("ncclRecv"), 1);
}

INSTANTIATE_TEST_SUITE_P(Ranks, AlltoallTest, testing::Range(1, 5));

}  // namespace
}  // namespace keras_hvd::nccl
