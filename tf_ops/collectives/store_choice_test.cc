// The stores that were fastest when all were tried are the ones chosen.
#include "tf_ops/collectives/store_choice.h"

#include <gtest/gtest.h>

#include <set>

namespace keras_hvd {
namespace {

constexpr int64_t kMebibyte = 1 << 20;

// A machine on which each kind takes so long; the first of each meets page faults.
void Run(StoreChoice* choice, int64_t bytes, std::array<double, kStoresKinds> seconds) {
  std::set<Stores> met;
  for (int i = 0; i < 100; ++i) {
    const Stores stores = choice->Choose(bytes);
    const double faults = met.insert(stores).second ? 1 : 0;
    choice->Learn(bytes, stores, seconds[static_cast<int>(stores)] + faults);
  }
  EXPECT_EQ(met.size(), static_cast<size_t>(kStoresKinds));
}

TEST(StoreChoice, TakesTheFastestOfEachSize) {
  StoreChoice choice;
  Run(&choice, kMebibyte, {0.1, 0.2, 0.3});
  Run(&choice, 16 * kMebibyte, {0.3, 0.2, 0.4});
  Run(&choice, 64 * kMebibyte, {0.3, 0.2, 0.1});
  EXPECT_EQ(choice.Choose(kMebibyte), Stores::kOrdinary);
  EXPECT_EQ(choice.Choose(16 * kMebibyte), Stores::kStreamingResult);
  EXPECT_EQ(choice.Choose(64 * kMebibyte), Stores::kStreaming);
}

TEST(StoreChoice, SizesOfOneClassCompareByTheirBytes) {
  StoreChoice choice;
  // A short time for few bytes is not better than a long one for many.
  for (int i = 0; i < 100; ++i) {
    const bool half = i % 2 == 0;
    const int64_t bytes = half ? kMebibyte : 2 * kMebibyte - 1;
    const Stores stores = choice.Choose(bytes);
    const double per_byte = stores == Stores::kStreaming ? 1e-9 : 2e-9;
    choice.Learn(bytes, stores, per_byte * static_cast<double>(bytes));
  }
  EXPECT_EQ(choice.Choose(kMebibyte), Stores::kStreaming);
}

TEST(StoreChoice, SmallTensorsStayInTheCaches) {
  StoreChoice choice;
  for (int64_t bytes : {0, 1, 64 << 10}) {
    choice.Learn(bytes, Stores::kStreaming, 0);
    EXPECT_EQ(choice.Choose(bytes), Stores::kOrdinary);
  }
}

}  // namespace
}  // namespace keras_hvd
