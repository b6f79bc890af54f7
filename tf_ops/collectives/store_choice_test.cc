// The stores that are fastest on a machine are used, also when the machine changes.
#include "tf_ops/collectives/store_choice.h"

#include <gtest/gtest.h>

namespace keras_hvd {
namespace {

constexpr int64_t kMebibyte = 1 << 20;

// Runs allreduces on a machine on which each kind takes so long; returns how often each
// was used.
std::array<int, kStoresKinds> RunOn(StoreChoice* choice, int64_t bytes, int times,
                                    std::array<double, kStoresKinds> seconds) {
  std::array<int, kStoresKinds> uses{};
  for (int i = 0; i < times; ++i) {
    const Stores stores = choice->Choose(bytes);
    uses[static_cast<int>(stores)] += 1;
    choice->Learn(bytes, stores, seconds[static_cast<int>(stores)]);
  }
  return uses;
}

TEST(StoreChoice, TakesTheFastestOfEachSize) {
  StoreChoice choice;
  EXPECT_GT(RunOn(&choice, kMebibyte, 1000, {0.1, 0.2, 0.3})[0], 960);
  EXPECT_GT(RunOn(&choice, 16 * kMebibyte, 1000, {0.3, 0.2, 0.4})[1], 930);
  EXPECT_GT(RunOn(&choice, 64 * kMebibyte, 1000, {0.5, 0.5, 0.1})[2], 980);
}

TEST(StoreChoice, ATrialThatMetPageFaultsDoesNotCount) {
  StoreChoice choice;
  RunOn(&choice, kMebibyte, 1, {9, 9, 9});
  EXPECT_GT(RunOn(&choice, kMebibyte, 1000, {0.1, 0.3, 0.3})[0], 960);
}

TEST(StoreChoice, FollowsAMachineThatChanges) {
  StoreChoice choice;
  RunOn(&choice, kMebibyte, 500, {0.1, 0.2, 0.3});
  EXPECT_GT(RunOn(&choice, kMebibyte, 500, {0.5, 0.5, 0.2})[2], 450);
  // What was slow is tried again, and found to be fast again.
  EXPECT_GT(RunOn(&choice, kMebibyte, 1000, {0.1, 0.2, 0.3})[0], 800);
}

TEST(StoreChoice, OneLatePeerChangesNothing) {
  StoreChoice choice;
  RunOn(&choice, kMebibyte, 100, {0.1, 0.2, 0.3});
  choice.Learn(kMebibyte, Stores::kOrdinary, 0.3);
  EXPECT_GT(RunOn(&choice, kMebibyte, 100, {0.1, 0.2, 0.3})[0], 90);
}

TEST(StoreChoice, SizesOfOneClassCompareByTheirBytes) {
  StoreChoice choice;
  int streaming = 0;
  // A short time for few bytes is not better than a long one for many.
  for (int i = 0; i < 100; ++i) {
    const int64_t bytes = i % 2 == 0 ? kMebibyte : 2 * kMebibyte - 1;
    const Stores stores = choice.Choose(bytes);
    streaming += stores == Stores::kStreaming;
    const double per_byte = stores == Stores::kStreaming ? 1e-9 : 2e-9;
    choice.Learn(bytes, stores, per_byte * static_cast<double>(bytes));
  }
  EXPECT_GT(streaming, 90);
}

TEST(StoreChoice, SizesBeyondAllCachesShareWhatIsKnown) {
  StoreChoice choice;
  RunOn(&choice, 64 * kMebibyte, 10, {0.2, 0.1, 0.2});
  EXPECT_EQ(RunOn(&choice, 256 * kMebibyte, 10, {0.8, 0.4, 0.8})[1], 10);
}

TEST(StoreChoice, SmallTensorsStayInTheCaches) {
  StoreChoice choice;
  for (int64_t bytes : {0, 1, 16 << 10}) {
    choice.Learn(bytes, Stores::kStreaming, 0);
    EXPECT_EQ(choice.Choose(bytes), Stores::kOrdinary);
  }
}

}  // namespace
}  // namespace keras_hvd
