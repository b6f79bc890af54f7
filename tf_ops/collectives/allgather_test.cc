// Allgather of uneven parts.
#include "tf_ops/collectives/allgather.h"

#include "tf_ops/collectives/testing.h"

namespace keras_hvd {
namespace {

class AllgatherTest : public testing::TestWithParam<int> {};

void CheckRows(Ranks* ranks, const std::vector<int64_t>& rows, int64_t row_bytes,
               int without_memory = -1) {
  std::vector<std::vector<char>> inputs, outputs(ranks->size());
  std::vector<char> expected;
  for (int rank = 0; rank < ranks->size(); ++rank) {
    inputs.push_back(RandomBytes(rows[rank] * row_bytes, rank + 1));
    expected.insert(expected.end(), inputs[rank].begin(), inputs[rank].end());
  }
  ranks->Run([&](int rank, Communicator* communicator) {
    AllgatherOptions options;
    options.input = inputs[rank].data();
    options.rows = rows[rank];
    options.row_bytes = row_bytes;
    options.allocate = [&, rank](const std::vector<int64_t>& all) -> void* {
      EXPECT_EQ(all, rows);
      if (rank == without_memory) return nullptr;
      outputs[rank].resize(std::accumulate(all.begin(), all.end(), 0L) * row_bytes);
      return outputs[rank].data();
    };
    EXPECT_TRUE(Allgather(options, communicator));
  });
  for (int rank = 0; rank < ranks->size(); ++rank) {
    if (rank == without_memory) continue;
    ASSERT_TRUE(outputs[rank] == expected) << "rank " << rank;
  }
}

TEST_P(AllgatherTest, EvenAndUnevenParts) {
  Ranks ranks(GetParam());
  std::mt19937 random(GetParam());
  for (int64_t row_bytes : {1, 7, 64, 5000}) {
    for (int round = 0; round < 6; ++round) {
      std::vector<int64_t> rows(GetParam());
      for (int64_t& count : rows) count = random() % 3 == 0 ? 0 : random() % 20;
      CheckRows(&ranks, rows, row_bytes);
    }
  }
}

TEST_P(AllgatherTest, NothingFromAnybody) {
  Ranks ranks(GetParam());
  CheckRows(&ranks, std::vector<int64_t>(GetParam(), 0), 8);
  CheckRows(&ranks, std::vector<int64_t>(GetParam(), 3), 0);
}

TEST_P(AllgatherTest, EverythingFromOne) {
  Ranks ranks(GetParam());
  for (int rank = 0; rank < GetParam(); ++rank) {
    std::vector<int64_t> rows(GetParam(), 0);
    rows[rank] = 20000;
    CheckRows(&ranks, rows, 4);
  }
}

TEST_P(AllgatherTest, ARankWithoutMemoryDoesNotKeepTheOthersFromTheirs) {
  Ranks ranks(GetParam());
  for (int rank = 0; rank < GetParam(); ++rank) {
    CheckRows(&ranks, std::vector<int64_t>(GetParam(), 3000), 4, rank);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, AllgatherTest, testing::Range(1, 6));

}  // namespace
}  // namespace keras_hvd
