// Allgather of uneven parts.
#include "tf_ops/collectives/allgather.h"

#include "tf_ops/collectives/testing.h"

namespace keras_hvd {
namespace {

class AllgatherTest : public testing::TestWithParam<int> {};

// rows[tensor][rank], row_bytes[tensor]: gathered as one group.
void CheckGroup(Ranks* ranks, const std::vector<std::vector<int64_t>>& rows,
                const std::vector<int64_t>& row_bytes, int without_memory = -1) {
  const size_t count = rows.size();
  std::vector<std::vector<std::vector<char>>> inputs(ranks->size()),
      outputs(ranks->size());
  std::vector<std::vector<char>> expected(count);
  for (int rank = 0; rank < ranks->size(); ++rank) {
    outputs[rank].resize(count);
    for (size_t i = 0; i < count; ++i) {
      inputs[rank].push_back(
          RandomBytes(rows[i][rank] * row_bytes[i], rank + 1 + 100 * i));
      expected[i].insert(expected[i].end(), inputs[rank][i].begin(),
                         inputs[rank][i].end());
    }
  }
  ranks->Run([&](int rank, Communicator* communicator) {
    AllgatherOptions options;
    for (size_t i = 0; i < count; ++i) {
      AllgatherTensor& tensor = options.tensors.emplace_back();
      tensor.input = inputs[rank][i].data();
      tensor.rows = rows[i][rank];
      tensor.row_bytes = row_bytes[i];
      tensor.allocate = [&, rank, i](const std::vector<int64_t>& all) -> void* {
        EXPECT_EQ(all, rows[i]);
        if (rank == without_memory) return nullptr;
        outputs[rank][i].resize(expected[i].size());
        return outputs[rank][i].data();
      };
    }
    EXPECT_TRUE(Allgather(options, communicator));
  });
  for (int rank = 0; rank < ranks->size(); ++rank) {
    if (rank == without_memory) continue;
    ASSERT_TRUE(outputs[rank] == expected) << "rank " << rank;
  }
}

void CheckRows(Ranks* ranks, const std::vector<int64_t>& rows, int64_t row_bytes,
               int without_memory = -1) {
  CheckGroup(ranks, {rows}, {row_bytes}, without_memory);
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

TEST_P(AllgatherTest, GroupsOfUnevenParts) {
  Ranks ranks(GetParam());
  std::mt19937 random(GetParam());
  for (int round = 0; round < 10; ++round) {
    std::vector<std::vector<int64_t>> rows(1 + random() % 40);
    std::vector<int64_t> row_bytes;
    for (std::vector<int64_t>& counts : rows) {
      counts.resize(GetParam());
      for (int64_t& count : counts) count = random() % 3 == 0 ? 0 : random() % 20;
      row_bytes.push_back(random() % 5 == 0 ? random() % 1000 : random() % 9);
    }
    CheckGroup(&ranks, rows, row_bytes, round % 2 == 0 ? -1 : 0);
  }
}

// More first dimensions than a window has room for.
TEST_P(AllgatherTest, AGroupOfManyTensors) {
  Ranks ranks(GetParam());
  const std::vector<std::vector<int64_t>> rows(1100, std::vector(GetParam(), 2L));
  CheckGroup(&ranks, rows, std::vector<int64_t>(1100, 4));
}

INSTANTIATE_TEST_SUITE_P(Ranks, AllgatherTest, testing::Range(1, 6));

}  // namespace
}  // namespace keras_hvd
