// Broadcast on GPUs, from each root.
#include "tf_ops/nccl/broadcast.h"

#include "tf_ops/nccl/testing.h"

namespace keras_hvd::nccl {
namespace {

class BroadcastTest : public testing::TestWithParam<int> {};

void CheckBroadcast(Rank* rank, int root, int64_t bytes, bool in_place) {
  const bool is_root = rank->index() == root;
  const std::vector<char> expected = Numbers(DataType::kUint8, bytes, root, bytes);
  const cuda::Memory input =
      rank->Input(Numbers(DataType::kUint8, bytes, rank->index(), bytes));
  const cuda::Memory output = rank->Output(bytes);
  // A root that keeps its tensor; others have no input.
  const bool same = in_place && is_root;
  const BroadcastOptions options = {root, bytes, is_root ? input.data() : nullptr,
                                    same ? input.data() : output.data()};
  rank->Run([&] { return Broadcast(options, rank->communicator.get()); });
  EXPECT_TRUE(rank->Contents(same ? input : output) == expected) << rank->index();
}

TEST_P(BroadcastTest, FromEachRoot) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Libraries libraries(seed);
    RunRanks(libraries, GetParam(), [&](Rank* rank) {
      for (int root = 0; root < GetParam(); ++root) {
        for (int64_t bytes : {1, 64, 1001}) {
          CheckBroadcast(rank, root, bytes, seed % 2 == 0);
        }
      }
    });
  }
}

TEST_P(BroadcastTest, NothingOfNothing) {
  Libraries libraries(1);
  RunRanks(libraries, GetParam(),
           [&](Rank* rank) { CheckBroadcast(rank, 0, 0, true); });
  EXPECT_EQ(libraries.CountCalls("ncclGroupStart"), 0);
}

INSTANTIATE_TEST_SUITE_P(Ranks, BroadcastTest, testing::Range(1, 5));

}  // namespace
}  // namespace keras_hvd::nccl
