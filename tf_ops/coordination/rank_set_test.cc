// Sets of ranks: their members, and those of two of them.
#include "tf_ops/coordination/rank_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace keras_hvd {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::IsEmpty;

std::shared_ptr<const RankBitmap> Bitmap(std::vector<int> ranks) {
  return RankSet(std::move(ranks)).bitmap();
}

TEST(RanksTest, NoneIsAListToo) {
  const RankSet none;
  EXPECT_THAT(none, IsEmpty());
  EXPECT_FALSE(none.Has(0));
  EXPECT_EQ(none, RankSet(std::vector<int>()));
  EXPECT_NE(none, RankSet({0}));
  EXPECT_TRUE(RankSet({0}).HasAllOf(none));
  EXPECT_FALSE(none.HasAllOf({0}));
}

TEST(RanksTest, EqualListsAreEqualWhereverTheyAre) {
  const RankSet ranks = {3, 64, 200};
  EXPECT_EQ(ranks, RankSet({3, 64, 200}));
  EXPECT_EQ(RankSet::Hash()(ranks), RankSet::Hash()({3, 64, 200}));
  EXPECT_NE(ranks, RankSet({3, 64, 201}));
}

TEST(RankBitmapTest, HasWhatASetHas) {
  std::mt19937 random(42);
  const auto some = [&] {
    std::set<int> ranks;
    const int first = static_cast<int>(random() % 300);
    const int count = 1 + static_cast<int>(random() % 20);
    while (static_cast<int>(ranks.size()) < count) {
      ranks.insert(first + static_cast<int>(random() % (random() % 2 == 0 ? 24 : 300)));
    }
    return ranks;
  };
  int overlapping = 0, containing = 0;
  for (int i = 0; i < 10000; ++i) {
    const std::set<int> a = some();
    std::set<int> b = some();
    if (random() % 4 == 0) b = {*a.begin(), *a.rbegin()};
    const RankBitmap x(std::vector<int>(a.begin(), a.end()));
    const RankBitmap y(std::vector<int>(b.begin(), b.end()));
    std::set<int> both = a;
    both.insert(b.begin(), b.end());
    const bool overlap = both.size() < a.size() + b.size();
    overlapping += overlap ? 1 : 0;
    containing += both == a ? 1 : 0;
    ASSERT_EQ(x.HasAnyOf(y), overlap);
    ASSERT_EQ(x.HasAllOf(y), both == a);
    const RankBitmap united = RankBitmap::Union(x, y);
    ASSERT_EQ(united.count(), both.size());
    ASSERT_THAT(united.List(), ElementsAreArray(both));
    for (int rank = 0; rank < 700; ++rank) ASSERT_EQ(x.Has(rank), a.count(rank) == 1);
  }
  EXPECT_GT(overlapping, 2000);
  EXPECT_GT(containing, 2000);
}

TEST(RankUnionsTest, AreTheSameObjectAgain) {
  RankUnions unions;
  const auto a = Bitmap({0, 2});
  const auto b = Bitmap({1});
  const auto c = Bitmap({3});
  const auto ab = unions.Of(a, b);
  const auto abc = unions.Of(ab, c);
  EXPECT_THAT(abc->List(), ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(unions.Of(a, b), ab);
  EXPECT_EQ(unions.Of(ab, c), abc);
  EXPECT_EQ(unions.Of(nullptr, a), a);
}

TEST(RankUnionsTest, OfWhatOverlapsThereIsNone) {
  RankUnions unions;
  const auto a = Bitmap({0, 2});
  EXPECT_EQ(unions.Of(a, Bitmap({2, 3})), nullptr);
  EXPECT_EQ(unions.Of(a, a), nullptr);
  EXPECT_EQ(unions.Of(a, a), nullptr);
}

TEST(RankUnionsTest, ForgetSomeOfMany) {
  RankUnions unions;
  const auto a = Bitmap({0});
  std::weak_ptr<const RankBitmap> first;
  for (int rank = 1; rank < 2000; ++rank) {
    const auto both = unions.Of(a, Bitmap({rank}));
    ASSERT_THAT(both->List(), ElementsAre(0, rank));
    if (rank == 1) first = both;
  }
  EXPECT_TRUE(first.expired());
}

}  // namespace
}  // namespace keras_hvd
