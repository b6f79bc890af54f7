// Nobody leaves a barrier before all have come.
#include "tf_ops/collectives/barrier.h"

#include <atomic>

#include "tf_ops/collectives/testing.h"

namespace keras_hvd {
namespace {

class BarrierTest : public testing::TestWithParam<int> {};

TEST_P(BarrierTest, NobodyLeavesBeforeAllHaveCome) {
  Ranks ranks(GetParam());
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> come{0};
    ranks.Run([&](int, Communicator* communicator) {
      come += 1;
      EXPECT_TRUE(Barrier(communicator));
      EXPECT_EQ(come.load(), GetParam());
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, BarrierTest, testing::Range(1, 6));

// A job that fails ends the wait.
class FailingWaiter : public Waiter {
 public:
  bool Wait(const std::function<bool()>&, int awaited) override {
    awaited_ = awaited;
    return false;
  }
  bool Poll(const std::function<bool()>& ready, int awaited) override {
    return Wait(ready, awaited);
  }
  bool Pause(int64_t) override { return false; }
  int awaited_ = -1;
};

TEST(Barrier, EndsWhenTheJobFails) {
  std::shared_ptr<Segment> segment;
  ASSERT_TRUE(Segment::CreateLocal(2, kTinyExchange, &segment).ok());
  FailingWaiter waiter;
  Communicator communicator(segment, Topology::OneHost(0, 2), &waiter);
  ASSERT_TRUE(communicator.Begin({0, 1}, 1));
  EXPECT_FALSE(Barrier(&communicator));
  EXPECT_EQ(waiter.awaited_, 1);
}

// On a host of several, a rank's place in shared memory is its index on the host.
TEST(Barrier, AwaitsRanksNotPlaces) {
  std::shared_ptr<Segment> segment;
  ASSERT_TRUE(Segment::CreateLocal(2, kTinyExchange, &segment).ok());
  FailingWaiter waiter;
  Communicator communicator(segment, Topology(3, {0, 1, 0, 1}), &waiter);
  ASSERT_TRUE(communicator.Begin({1, 3}, 1));
  EXPECT_EQ(communicator.index(), 1);
  EXPECT_FALSE(Barrier(&communicator));
  EXPECT_EQ(waiter.awaited_, 1);
}

}  // namespace
}  // namespace keras_hvd
