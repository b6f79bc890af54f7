// The purpose of the stand-ins: ranks that order their streams with events have the
// right results whatever the seed, and where one wait is left out, that shows.
#include <algorithm>
#include <atomic>

#include "tf_ops/testing/child.h"
#include "tf_ops/testing/gpu/testing.h"

namespace keras_hvd::stand_in {
namespace {

constexpr int kRanks = 2;
constexpr int kCount = 100;
constexpr int kSteps = 3;
constexpr int kSeeds = 25;

enum class Fault {
  kNone,
  kReducesTooEarly,    // the collective does not wait for its input
  kReadsTooEarly,      // the kernel that reads does not wait for the collective
  kHostReadsTooEarly,  // the host does not wait for the collective
  kFreesTooEarly,      // memory is given back before the collective has run
};

// Kernels make an input, which is reduced; a kernel reads the result and the input is
// overwritten. Returns whether all was right.
bool Train(Rank& rank, nccl::Comm communicator, Fault fault) {
  std::atomic<bool> right{true};
  std::vector<float*> inputs;
  for (int step = 0; step < kSteps; ++step) {
    float* const input = rank.New<float>(kCount);
    float* const output = rank.New<float>(kCount);
    const float value = static_cast<float>(rank.rank() + step);
    const float expected = static_cast<float>(kRanks * step + 1);
    Libraries()->Enqueue(rank.compute,
                         [=] { std::fill(input, input + kCount, value); });
    if (fault != Fault::kReducesTooEarly) rank.Order(rank.compute, rank.collectives);
    ExpectBegun(Nccl().all_reduce(input, output, kCount, nccl::Type::kFloat32,
                                  nccl::kSum, communicator, rank.collectives));
    Expect(End(communicator));
    const cuda::Event reduced = rank.Record(rank.collectives);
    if (fault == Fault::kFreesTooEarly) rank.Free(input);
    if (fault != Fault::kReadsTooEarly) {
      Expect(Cuda().stream_wait_event(rank.compute, reduced, 0));
    }
    const auto check = [=, &right] {
      const bool same = std::all_of(output, output + kCount,
                                    [=](float each) { return each == expected; });
      if (!same) right = false;
    };
    Libraries()->Enqueue(rank.compute, check);
    if (fault == Fault::kFreesTooEarly) continue;
    if (fault == Fault::kHostReadsTooEarly) check();
    Libraries()->Enqueue(rank.compute,
                         [=] { std::fill(input, input + kCount, -1.0f); });
  }
  for (cuda::Stream stream : {rank.collectives, rank.compute}) {
    const cuda::Event end = rank.Record(stream);
    while (Cuda().query_event(end) == cuda::Result::kNotReady) {
      // A collective whose memory is gone fails, and does not end.
      if (!Libraries()->Violations().empty()) return false;
      sched_yield();
    }
  }
  return right;
}

// Deliberate failures are reported to nobody.
void BeQuiet() {
  for (FILE* stream : {stdout, stderr}) {
    if (freopen("/dev/null", "w", stream) == nullptr) _exit(4);
  }
}

// In a process of its own, for a thread sanitizer ends it at the first race.
int CodeOf(Fault fault, int devices) {
  Child child([=](const Child::Link&) {
    if (fault != Fault::kNone) BeQuiet();
    for (int seed = 0; seed < kSeeds; ++seed) {
      std::atomic<bool> right{true};
      RunRanks(kRanks, seed, devices, [&](Rank& rank, nccl::Comm communicator) {
        if (!Train(rank, communicator, fault)) right = false;
        if (fault == Fault::kFreesTooEarly) {
          Expect(Nccl().abort(communicator));  // it may have failed
          return;
        }
        Leave(communicator);
      });
      if (!right || !Libraries()->Violations().empty()) return 1;
      if (fault == Fault::kNone && Libraries()->CountLeaks().sum() != 0) return 2;
    }
    return testing::Test::HasFailure() ? 3 : 0;
  });
  const int status = child.Reap();
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class OrderTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Devices, OrderTest, testing::Values(1, kRanks));

TEST_P(OrderTest, RightWithAllWaits) { EXPECT_EQ(CodeOf(Fault::kNone, GetParam()), 0); }

TEST_P(OrderTest, MissingWaitForTheInputShows) {
  EXPECT_NE(CodeOf(Fault::kReducesTooEarly, GetParam()), 0);
}

TEST_P(OrderTest, MissingWaitForTheOutputShows) {
  EXPECT_NE(CodeOf(Fault::kReadsTooEarly, GetParam()), 0);
}

TEST_P(OrderTest, MissingWaitOfTheHostShows) {
  EXPECT_NE(CodeOf(Fault::kHostReadsTooEarly, GetParam()), 0);
}

TEST_P(OrderTest, MemoryGivenBackTooEarlyShows) {
  EXPECT_NE(CodeOf(Fault::kFreesTooEarly, GetParam()), 0);
}

}  // namespace
}  // namespace keras_hvd::stand_in
