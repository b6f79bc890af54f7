// In the simulation's jobs all is decided and ends on all ranks, and time passes as it
// should.
#include "benchmarks/simulation/coordination_simulation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <string>

namespace keras_hvd {
namespace {

using ::testing::SizeIs;

double Of(Part part, const SimulatedStep& step) {
  return step.critical[static_cast<size_t>(part)];
}

TEST(CoordinationSimulationTest, HasTheGradientsOfResNet50) {
  const auto gradients = ResNetGradients();
  EXPECT_THAT(gradients, SizeIs(161));
  std::set<std::string> names;
  int64_t bytes = 0;
  for (const auto& each : gradients) {
    names.insert(each->name);
    bytes += each->bytes();
  }
  EXPECT_THAT(names, SizeIs(161));
  EXPECT_EQ(bytes, 25557032 * 4);  // its trainable parameters, in float32
}

TEST(CoordinationSimulationTest, EndsAllRequestsOnAllRanks) {
  SimulationOptions options;
  options.steps = 3;
  for (int ranks : {1, 2, 8, 21, 160}) {
    SCOPED_TRACE(ranks);
    options.ranks = ranks;
    const SimulationResult result = Simulate(options, ResNetGradients());
    EXPECT_EQ(result.hosts, (ranks + 7) / 8);
    EXPECT_EQ(result.tensors_ended, 161 * ranks);
    // Of each rank to its leader and back; of each other host up the tree and down.
    EXPECT_EQ(result.messages, 2 * ranks + 2 * (result.hosts - 1));
    EXPECT_THAT(result.steps, SizeIs(3));
  }
}

TEST(CoordinationSimulationTest, AStepIsTheSumOfItsParts) {
  SimulationOptions options;
  options.ranks = 160;  // 20 hosts: three levels of the tree
  options.connection_seconds = 1e-3;
  for (const SimulatedStep& step : Simulate(options, ResNetGradients()).steps) {
    const double sum = std::accumulate(step.critical.begin(), step.critical.end(), 0.0);
    EXPECT_NEAR(sum, step.seconds, 1e-9);
    EXPECT_GE(Of(Part::kConnection, step), 8e-3);
  }
}

TEST(CoordinationSimulationTest, HopsTakeTheirTimeUpAndDown) {
  SimulationOptions options;
  options.ranks = 160;
  options.hop_seconds = 1;
  options.local_seconds = 0.001;
  for (const SimulatedStep& step : Simulate(options, ResNetGradients()).steps) {
    EXPECT_NEAR(Of(Part::kHop, step), 4, 1e-9);
    EXPECT_NEAR(Of(Part::kLocal, step), 0.002, 1e-9);
  }
}

TEST(CoordinationSimulationTest, RanksThatShareACoreTakeTurns) {
  SimulationOptions options;
  options.cores = 1;
  const SimulationResult result = Simulate(options, ResNetGradients());
  for (const SimulatedStep& step : result.steps) {
    // No core waits while another rank could work.
    EXPECT_LT(Of(Part::kLocal, step), 3 * options.local_seconds);
    const double work = step.seconds - Of(Part::kLocal, step);
    EXPECT_GT(Of(Part::kSubmit, step) + Of(Part::kFinish, step), work / 100);
  }
}

}  // namespace
}  // namespace keras_hvd
