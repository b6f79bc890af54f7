// Hashes tell results apart, and come to all members whatever ran before them.
#include "tf_ops/collectives/hashes.h"

#include <set>

#include "tf_ops/collectives/broadcast.h"
#include "tf_ops/collectives/testing.h"

namespace keras_hvd {
namespace {

TEST(HashTest, TellsEveryChangedBitAndLengthApart) {
  std::set<uint64_t> hashes;
  std::vector<char> bytes = RandomBytes(61, 1);
  for (int64_t length = 0; length <= 61; ++length) {
    EXPECT_TRUE(hashes.insert(Hash(bytes.data(), length)).second) << length;
  }
  for (int bit = 0; bit < 61 * 8; ++bit) {
    bytes[bit / 8] ^= 1 << bit % 8;
    EXPECT_TRUE(hashes.insert(Hash(bytes.data(), 61)).second) << bit;
    bytes[bit / 8] ^= 1 << bit % 8;
  }
  EXPECT_EQ(hashes.count(Hash(bytes.data(), 61)), 1u);
  EXPECT_EQ(hashes.count(kNoResult), 0u);
}

// More hashes than a window has room for, behind broadcasts of any number of rounds,
// of which the members are done at different times.
TEST(ExchangeHashesTest, BehindACollectiveOfAnyLength) {
  constexpr int64_t kWindow = kTinyExchange / 2;
  Ranks ranks(3);
  for (int64_t bytes : {int64_t{0}, int64_t{5}, kWindow + 1, 5 * kWindow}) {
    for (int64_t count : {int64_t{1}, kWindow / 8, kWindow / 8 + 1, kWindow / 2}) {
      std::vector<std::vector<uint64_t>> expected(3);
      for (int rank = 0; rank < 3; ++rank) {
        for (int64_t i = 0; i < count; ++i) expected[rank].push_back(rank * count + i);
      }
      const std::vector<char> data = RandomBytes(bytes, bytes);
      ranks.Run([&](int rank, Communicator* communicator) {
        std::vector<char> output(bytes);
        ASSERT_TRUE(Broadcast({1, bytes, data.data(), output.data()}, communicator));
        std::vector<std::vector<uint64_t>> hashes;
        ASSERT_TRUE(AllgatherHashes(expected[rank], communicator, &hashes));
        EXPECT_EQ(output, data);
        EXPECT_EQ(hashes, expected);
      });
    }
  }
}

}  // namespace
}  // namespace keras_hvd
