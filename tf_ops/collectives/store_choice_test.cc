// The stores that are fastest on a machine are used, also when the machine changes.
#include "tf_ops/collectives/store_choice.h"

#include <gtest/gtest.h>

namespace keras_hvd {
namespace {

constexpr int64_t kMebibyte = 1 << 20;

// Runs allreduces on a machine on which each kind takes `seconds`. Returns how often
// each was used.
std::array<int, kStoresKinds> RunOn(StoreChoice* choice, int64_t bytes, int times,
                                    std::array<double, kStoresKinds> seconds,
                                    bool in_place = true) {
  std::array<int, kStoresKinds> uses{};
  for (int i = 0; i < times; ++i) {
    const Stores stores = choice->Choose({bytes, in_place});
    uses[static_cast<int>(stores)] += 1;
    choice->Learn({bytes, in_place}, stores, seconds[static_cast<int>(stores)]);
  }
  return uses;
}

TEST(StoreChoice, TakesTheFastestOfEachSize) {
  StoreTable table{};
  StoreChoice choice(&table);
  EXPECT_GT(RunOn(&choice, kMebibyte, 1000, {0.1, 0.2, 0.3})[0], 960);
  EXPECT_GT(RunOn(&choice, 16 * kMebibyte, 1000, {0.3, 0.2, 0.4})[1], 930);
  EXPECT_GT(RunOn(&choice, 64 * kMebibyte, 1000, {0.5, 0.5, 0.1})[2], 980);
}

TEST(StoreChoice, ATrialThatMetPageFaultsDoesNotCount) {
  StoreTable table{};
  StoreChoice choice(&table);
  RunOn(&choice, kMebibyte, 1, {9, 9, 9});
  EXPECT_GT(RunOn(&choice, kMebibyte, 1000, {0.1, 0.3, 0.3})[0], 960);
}

TEST(StoreChoice, FollowsAMachineThatChanges) {
  StoreTable table{};
  StoreChoice choice(&table);
  RunOn(&choice, kMebibyte, 500, {0.1, 0.2, 0.3});
  EXPECT_GT(RunOn(&choice, kMebibyte, 500, {0.5, 0.5, 0.2})[2], 450);
  // A kind that was slow is tried again, and found to be fast again.
  EXPECT_GT(RunOn(&choice, kMebibyte, 1000, {0.1, 0.2, 0.3})[0], 800);
}

TEST(StoreChoice, OneLatePeerChangesNothing) {
  StoreTable table{};
  StoreChoice choice(&table);
  RunOn(&choice, kMebibyte, 100, {0.1, 0.2, 0.3});
  choice.Learn({kMebibyte, true}, Stores::kOrdinary, 0.3);
  EXPECT_GT(RunOn(&choice, kMebibyte, 100, {0.1, 0.2, 0.3})[0], 90);
}

TEST(StoreChoice, AMomentInWhichEverythingIsSlowChangesNothing) {
  StoreTable table{};
  StoreChoice choice(&table);
  RunOn(&choice, kMebibyte, 100, {0.1, 0.2, 0.3});
  RunOn(&choice, kMebibyte, 10, {1, 2, 3});
  EXPECT_GT(RunOn(&choice, kMebibyte, 100, {0.1, 0.2, 0.3})[0], 90);
}

TEST(StoreChoice, ATrialThatBeginsWithCachesOfOtherStoresCountsByWhatFollows) {
  StoreTable table{};
  StoreChoice choice(&table);
  int ordinary = 0;
  Stores last = Stores::kStreaming;
  // Ordinary stores are faster, but only after each other.
  for (int i = 0; i < 200; ++i) {
    const Stores stores = choice.Choose({kMebibyte, true});
    const bool warm = last == Stores::kOrdinary;
    const double seconds = stores == Stores::kOrdinary && warm ? 0.1 : 0.2;
    choice.Learn({kMebibyte, true}, stores, seconds);
    ordinary += stores == Stores::kOrdinary;
    last = stores;
  }
  EXPECT_GT(ordinary, 180);
}

TEST(StoreChoice, ResultsBesideTheInputHaveTheirOwnExperience) {
  StoreTable table{};
  StoreChoice choice(&table);
  std::array<int, 2> ordinary{};
  for (int i = 0; i < 200; ++i) {
    for (bool in_place : {false, true}) {
      const std::array<double, kStoresKinds> seconds = {in_place ? 0.1 : 0.4, 0.2, 0.3};
      ordinary[in_place ? 1 : 0] += RunOn(&choice, kMebibyte, 1, seconds, in_place)[0];
    }
  }
  EXPECT_LT(ordinary[0], 10);
  EXPECT_GT(ordinary[1], 180);
}

TEST(StoreChoice, AllreducesBetweenHostsHaveTheirOwnExperience) {
  StoreTable table{};
  StoreChoice choice(&table);
  // The network takes most of the time there.
  for (int i = 0; i < 200; ++i) {
    for (bool between_hosts : {false, true}) {
      const StoreUse use = {kMebibyte, true, between_hosts};
      const Stores stores = choice.Choose(use);
      const bool is_best = (stores == Stores::kOrdinary) != between_hosts;
      choice.Learn(use, stores, (is_best ? 0.1 : 0.2) + (between_hosts ? 1 : 0));
    }
  }
  EXPECT_EQ(choice.Choose({kMebibyte, true, false}), Stores::kOrdinary);
  EXPECT_NE(choice.Choose({kMebibyte, true, true}), Stores::kOrdinary);
}

TEST(StoreChoice, SizesOfOneClassCompareByTheirBytes) {
  StoreTable table{};
  StoreChoice choice(&table);
  int streaming = 0;
  // A short time for few bytes is not better than a long one for many.
  for (int i = 0; i < 100; ++i) {
    const int64_t bytes = i % 2 == 0 ? kMebibyte : 2 * kMebibyte - 1;
    const Stores stores = choice.Choose({bytes, true});
    streaming += stores == Stores::kStreaming;
    const double per_byte = stores == Stores::kStreaming ? 1e-9 : 2e-9;
    choice.Learn({bytes, true}, stores, per_byte * static_cast<double>(bytes));
  }
  EXPECT_GT(streaming, 90);
}

TEST(StoreChoice, SizesBeyondAllCachesShareWhatIsKnown) {
  StoreTable table{};
  StoreChoice choice(&table);
  RunOn(&choice, 64 * kMebibyte, 10, {0.2, 0.1, 0.2});
  EXPECT_EQ(RunOn(&choice, 256 * kMebibyte, 10, {0.8, 0.4, 0.8})[1], 10);
}

TEST(StoreChoice, SmallTensorsStayInTheCaches) {
  StoreTable table{};
  StoreChoice choice(&table);
  for (int64_t bytes : {0, 1, 16 << 10}) {
    choice.Learn({bytes, true}, Stores::kStreaming, 0);
    EXPECT_EQ(choice.Choose({bytes, true}), Stores::kOrdinary);
  }
}

TEST(StoreChoice, MembersTakeWhatTheirFirstOneHasLearned) {
  StoreTable tables[2]{};
  StoreChoice first(&tables[0]), other(&tables[1]);
  other.Follow(tables[0]);
  for (int i = 0; i < 100; ++i) {
    for (bool in_place : {false, true}) {
      const Stores stores = first.Choose({kMebibyte, in_place});
      EXPECT_EQ(other.Choose({kMebibyte, in_place}), stores);
      const double seconds = (stores == Stores::kStreaming) == in_place ? 0.1 : 0.5;
      other.Learn({kMebibyte, in_place}, stores, 0.6 - seconds);
      first.Learn({kMebibyte, in_place}, stores, seconds);
    }
  }
  EXPECT_EQ(other.Choose({kMebibyte, true}), Stores::kStreaming);
  EXPECT_NE(other.Choose({kMebibyte, false}), Stores::kStreaming);
  // As the first one of another set it has no experience.
  other.Follow(tables[1]);
  EXPECT_EQ(other.Choose({kMebibyte, true}), Stores::kOrdinary);
}

TEST(StoreChoice, EachFirstMemberHasItsOwnExperience) {
  StoreTable tables[2]{};
  StoreChoice first(&tables[0]), other(&tables[1]);
  RunOn(&first, kMebibyte, 100, {0.5, 0.5, 0.1});
  EXPECT_EQ(RunOn(&first, kMebibyte, 10, {0.5, 0.5, 0.1})[2], 10);
  EXPECT_GT(RunOn(&other, kMebibyte, 100, {0.1, 0.5, 0.5})[0], 90);
}

TEST(StoreChoice, TrialsThatOneMemberEntersLateCount) {
  StoreTable tables[2]{};
  StoreChoice first(&tables[0]), late(&tables[1]);
  late.Follow(tables[0]);
  Stores of_late = Stores::kOrdinary;
  int streaming = 0;
  for (int i = 0; i < 800; ++i) {
    const Stores stores = first.Choose({kMebibyte, true});
    const bool both = stores == of_late;
    const double seconds = both && stores == Stores::kStreaming ? 0.1 : 0.5;
    streaming += stores == Stores::kStreaming;
    // It always begins the next call before the first one has learned from this one.
    of_late = late.Choose({kMebibyte, true});
    first.Learn({kMebibyte, true}, stores, seconds);
  }
  EXPECT_GT(streaming, 700);
}

}  // namespace
}  // namespace keras_hvd
