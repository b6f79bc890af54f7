// Topology: which ranks share a host, and how hosts are connected.
#include "tf_ops/transport/topology.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace keras_hvd {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(TopologyTest, HostsMayHaveDifferentNumbersOfRanksInAnyOrder) {
  const std::vector<int> hosts = {1, 0, 1, 2, 1};
  EXPECT_THAT(Topology(0, hosts).local_ranks(), ElementsAre(0, 2, 4));
  EXPECT_THAT(Topology(1, hosts).local_ranks(), ElementsAre(1));
  EXPECT_THAT(Topology(4, hosts).local_ranks(), ElementsAre(0, 2, 4));
  EXPECT_EQ(Topology(4, hosts).local_size(), 3);
  EXPECT_EQ(Topology(1, hosts).local_index(4), 2);
  EXPECT_TRUE(Topology(0, hosts).is_local(2));
  EXPECT_FALSE(Topology(0, hosts).is_local(3));
}

TEST(TopologyTest, IsHomogeneousIfAllHostsHaveEquallyMany) {
  EXPECT_TRUE(Topology::OneHost(0, 3).is_homogeneous());
  EXPECT_TRUE(Topology(0, {0, 1, 1, 0}).is_homogeneous());
  EXPECT_FALSE(Topology(0, {0, 1, 1}).is_homogeneous());
}

TEST(TopologyTest, HostsAreNumberedByTheirLeaders) {
  const Topology topology(4, {7, 3, 7, 5, 7});
  EXPECT_EQ(topology.hosts(), 3);
  EXPECT_EQ(topology.host(), 0);
  EXPECT_EQ(topology.leader(), 0);
  EXPECT_FALSE(topology.is_leader());
  EXPECT_EQ(topology.host_of(1), 1);
  EXPECT_EQ(topology.leader_of(2), 3);
  EXPECT_TRUE(Topology(3, {7, 3, 7, 5, 7}).is_leader());
}

TEST(TopologyTest, OneHostHasThemAll) {
  EXPECT_THAT(Topology::OneHost(2, 3).local_ranks(), ElementsAre(0, 1, 2));
  EXPECT_EQ(Topology::OneHost(2, 3).parent(), -1);
  EXPECT_THAT(Topology::OneHost(0, 3).children(), IsEmpty());
}

TEST(TopologyTest, LeadersFormATree) {
  // Two ranks on each of six hosts: 0 is above 1 and 2, 1 above 3 and 4, 2 above 5.
  const std::vector<int> hosts = {0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5};
  EXPECT_THAT(Topology(0, hosts, 2).children(), ElementsAre(1, 2));
  EXPECT_THAT(Topology(7, hosts, 2).children(), ElementsAre(3, 4));
  EXPECT_THAT(Topology(2, hosts, 2).children(), ElementsAre(5));
  EXPECT_EQ(Topology(5, hosts, 2).parent(), 2);
  EXPECT_EQ(Topology(3, hosts, 2).parent(), 1);
  EXPECT_THAT(Topology(0, hosts, 2).ranks_below(1), ElementsAre(1, 3, 4, 7, 9, 10));
  EXPECT_THAT(Topology(0, hosts, 2).ranks_below(5), ElementsAre(5, 11));
}

TEST(TopologyTest, EveryHostIsBelowExactlyOne) {
  for (int size : {1, 2, 17, 18, 300}) {
    std::vector<int> hosts(size);
    std::iota(hosts.begin(), hosts.end(), 0);
    std::vector<int> above(size, -1);
    for (int rank = 0; rank < size; ++rank) {
      for (int child : Topology(rank, hosts).children()) above[child] = rank;
    }
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(Topology(rank, hosts).parent(), above[rank]);
    }
    EXPECT_EQ(Topology(0, hosts).ranks_below(0).size(), static_cast<size_t>(size));
  }
}

}  // namespace
}  // namespace keras_hvd
