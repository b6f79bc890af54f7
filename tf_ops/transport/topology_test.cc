// Topology: which ranks share a host with one.
#include "tf_ops/transport/topology.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace keras_hvd {
namespace {

using testing::ElementsAre;

TEST(TopologyTest, HostsMayHaveDifferentNumbersOfRanksInAnyOrder) {
  const std::vector<int> hosts = {1, 0, 1, 2, 1};
  EXPECT_THAT(Topology(0, hosts).local_ranks(), ElementsAre(0, 2, 4));
  EXPECT_THAT(Topology(1, hosts).local_ranks(), ElementsAre(1));
  EXPECT_THAT(Topology(4, hosts).local_ranks(), ElementsAre(0, 2, 4));
  EXPECT_EQ(Topology(4, hosts).local_size(), 3);
}

TEST(TopologyTest, OneHostHasThemAll) {
  EXPECT_THAT(Topology::OneHost(2, 3).local_ranks(), ElementsAre(0, 1, 2));
}

}  // namespace
}  // namespace keras_hvd
