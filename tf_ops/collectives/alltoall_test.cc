// Alltoall of even and uneven splits.
#include "tf_ops/collectives/alltoall.h"

#include "tf_ops/collectives/testing.h"

namespace keras_hvd {
namespace {

class AlltoallTest : public testing::TestWithParam<int> {};

// splits[rank][peer]: how many rows go from one to the other.
void CheckSplits(Ranks* ranks, const std::vector<std::vector<int64_t>>& splits,
                 int64_t row_bytes, int without_memory = -1) {
  const int size = ranks->size();
  std::vector<std::vector<char>> inputs(size), outputs(size), expected(size);
  std::vector<std::vector<int64_t>> received(size);
  for (int rank = 0; rank < size; ++rank) {
    for (int peer = 0; peer < size; ++peer) {
      const std::vector<char> part =
          RandomBytes(splits[rank][peer] * row_bytes, rank * 100 + peer);
      inputs[rank].insert(inputs[rank].end(), part.begin(), part.end());
      expected[peer].insert(expected[peer].end(), part.begin(), part.end());
      received[peer].push_back(splits[rank][peer]);
    }
  }
  ranks->Run([&](int rank, Communicator* communicator) {
    AlltoallOptions options;
    options.input = inputs[rank].data();
    options.splits = splits[rank];
    options.row_bytes = row_bytes;
    options.allocate = [&, rank](const std::vector<int64_t>& rows) -> void* {
      EXPECT_EQ(rows, received[rank]);
      if (rank == without_memory) return nullptr;
      outputs[rank].resize(expected[rank].size());
      return outputs[rank].data();
    };
    EXPECT_TRUE(Alltoall(options, communicator));
  });
  for (int rank = 0; rank < size; ++rank) {
    if (rank == without_memory) continue;
    ASSERT_TRUE(outputs[rank] == expected[rank]) << "rank " << rank;
  }
}

std::vector<std::vector<int64_t>> AllSplits(int size, int64_t rows) {
  return std::vector<std::vector<int64_t>>(size, std::vector<int64_t>(size, rows));
}

TEST_P(AlltoallTest, EvenSplits) {
  Ranks ranks(GetParam());
  for (int64_t rows : {0, 1, 5, 1000, 9001}) {
    for (int64_t row_bytes : {0, 1, 4, 12}) {
      CheckSplits(&ranks, AllSplits(GetParam(), rows), row_bytes);
    }
  }
}

TEST_P(AlltoallTest, UnevenSplits) {
  Ranks ranks(GetParam());
  std::mt19937 random(GetParam());
  for (int round = 0; round < 20; ++round) {
    auto splits = AllSplits(GetParam(), 0);
    for (std::vector<int64_t>& of_rank : splits) {
      for (int64_t& rows : of_rank) rows = random() % 3 == 0 ? 0 : random() % 900;
    }
    CheckSplits(&ranks, splits, 1 + random() % 30);
  }
}

TEST_P(AlltoallTest, EverythingFromOneToOne) {
  Ranks ranks(GetParam());
  for (int from = 0; from < GetParam(); ++from) {
    for (int to = 0; to < GetParam(); ++to) {
      auto splits = AllSplits(GetParam(), 0);
      splits[from][to] = 20000;
      CheckSplits(&ranks, splits, 3);
    }
  }
}

TEST_P(AlltoallTest, ARankWithoutMemoryDoesNotKeepTheOthersFromTheirs) {
  Ranks ranks(GetParam());
  for (int rank = 0; rank < GetParam(); ++rank) {
    CheckSplits(&ranks, AllSplits(GetParam(), 3000), 4, rank);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, AlltoallTest, testing::Range(1, 6));

}  // namespace
}  // namespace keras_hvd
