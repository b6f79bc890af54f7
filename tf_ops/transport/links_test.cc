// LinksNeeded: both ends of each link need it.
#include "tf_ops/transport/links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <tuple>

namespace keras_hvd {
namespace {

// Both ends of each link, and its purpose.
std::multiset<std::tuple<int, int, LinkPurpose>> AllLinks(const std::vector<int>& hosts,
                                                          int fan_out) {
  std::multiset<std::tuple<int, int, LinkPurpose>> links;
  for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank) {
    for (const Link& link : LinksNeeded(Topology(rank, hosts, fan_out))) {
      links.emplace(rank, link.peer, link.purpose);
    }
  }
  return links;
}

TEST(LinksTest, OneHostNeedsNone) {
  EXPECT_TRUE(LinksNeeded(Topology::OneHost(1, 3)).empty());
}

TEST(LinksTest, BothEndsNeedIt) {
  const auto links = AllLinks({0, 1, 2, 3, 4, 0, 2, 2}, 2);
  for (const auto& [rank, peer, purpose] : links) {
    EXPECT_EQ(links.count({rank, peer, purpose}), 1u);
    EXPECT_EQ(links.count({peer, rank, purpose}), 1u);
  }
}

TEST(LinksTest, LeadersFormTheTreeAndRanksOfDifferentHostsMeet) {
  const auto links = AllLinks({0, 1, 0, 1, 2}, 1);
  const auto has = [&](int a, int b, LinkPurpose purpose) {
    return links.count({a, b, purpose}) == 1;
  };
  EXPECT_TRUE(has(0, 1, LinkPurpose::kControl));
  EXPECT_TRUE(has(1, 4, LinkPurpose::kControl));
  EXPECT_FALSE(has(0, 4, LinkPurpose::kControl));
  EXPECT_FALSE(has(2, 1, LinkPurpose::kControl));
  EXPECT_TRUE(has(2, 3, LinkPurpose::kData));
  EXPECT_FALSE(has(0, 2, LinkPurpose::kData));
}

TEST(LinksTest, OtherRanksReachTheLeadersNextToTheirHost) {
  // Host 1 is between the others, and has ranks 1 and 3.
  const auto links = AllLinks({0, 1, 0, 1, 2}, 1);
  const auto has = [&](int a, int b) {
    return links.count({a, b, LinkPurpose::kFailure}) == 1;
  };
  EXPECT_TRUE(has(3, 0));
  EXPECT_TRUE(has(3, 4));
  EXPECT_TRUE(has(2, 1));
  EXPECT_FALSE(has(2, 4));
  EXPECT_FALSE(has(2, 3));
  EXPECT_FALSE(has(0, 1));
  // If host 1 is lost, the last one turns to the first.
  EXPECT_TRUE(has(4, 0));
}

TEST(LinksTest, HostsBelowALostRootTurnToHostOne) {
  const auto links = AllLinks({0, 1, 2, 3}, 16);
  EXPECT_EQ(links.count({2, 1, LinkPurpose::kFailure}), 1u);
  EXPECT_EQ(links.count({3, 1, LinkPurpose::kFailure}), 1u);
  EXPECT_EQ(links.count({2, 3, LinkPurpose::kFailure}), 0u);
  EXPECT_EQ(links.count({1, 0, LinkPurpose::kFailure}), 0u);
}

}  // namespace
}  // namespace keras_hvd
