// Broadcast from every root.
#include "tf_ops/collectives/broadcast.h"

#include "tf_ops/collectives/testing.h"

namespace keras_hvd {
namespace {

class BroadcastTest : public testing::TestWithParam<int> {};

TEST_P(BroadcastTest, EveryRootAndSize) {
  Ranks ranks(GetParam());
  for (int64_t bytes : {0, 1, 4095, 4096, 4097, 8192, 12288, 100001}) {
    for (int root = 0; root < GetParam(); ++root) {
      for (bool in_place : {false, true}) {
        const std::vector<char> sent = RandomBytes(bytes, bytes + root);
        std::vector<std::vector<char>> received(GetParam(), std::vector<char>(bytes));
        if (in_place) received[root] = sent;
        ranks.Run([&](int rank, Communicator* communicator) {
          BroadcastOptions options;
          options.root = root;
          options.bytes = bytes;
          options.output = received[rank].data();
          options.input = in_place ? received[rank].data() : sent.data();
          // Only the root's input counts.
          if (rank != root) options.input = nullptr;
          EXPECT_TRUE(Broadcast(options, communicator));
        });
        for (int rank = 0; rank < GetParam(); ++rank) {
          ASSERT_TRUE(received[rank] == sent) << "rank " << rank << ", root " << root;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, BroadcastTest, testing::Range(1, 6));

}  // namespace
}  // namespace keras_hvd
