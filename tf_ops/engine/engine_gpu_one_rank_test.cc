// The engine with tensors on GPUs in sets of one rank, alone in its job or not: no
// NCCL, and the CPU's results.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tf_ops/collectives/number.h"
#include "tf_ops/engine/gpu_plan_testing.h"

namespace keras_hvd {
namespace {

using stand_in::StandIn;

void ExpectNoNccl(const StandIn& libraries) {
  for (const std::string& function : FunctionsOf(libraries)) {
    EXPECT_NE(function.rfind("nccl", 0), 0u) << function;
  }
}

Ask Reducing(ReduceOp op, double prescale, double postscale) {
  Ask ask = Sum("x", {1, 2, 4});
  ask.description.reduction = {op, prescale, postscale};
  return ask;
}

Ask AverageOfFloat8() {
  Ask ask = Reducing(ReduceOp::kAverage, 1, 1);
  ask.description.tensors = {{DataType::kFloat8E5m2, {3}}};
  ask.input = {0x3c, 0x40, 0x44};  // 1, 2, 4
  return ask;
}

TEST(GpuOneRankTest, EachKindHasTheCpusResultsWithoutNccl) {
  const StandIn libraries;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    CapturedErrors errors;
    {
      GpuJob job(libraries, 1, seed, [](EngineOptions* options, int) {
        options->gpu_libraries.nccl = "/no/libnccl.so.2";
      });
      RunAll(&job[0], 0, GpuPlans(1, seed, 60));
      ExpectNoNccl(libraries);
      EXPECT_GT(CountCalls(libraries, "cuMemcpyDtoDAsync"), 0);
    }
    EXPECT_EQ(errors.text(), "");
  }
}

TEST(GpuOneRankTest, NothingIsCopiedInPlaceNorThroughTheHost) {
  const StandIn libraries;
  for (const bool in_place : {true, false}) {
    GpuJob job(libraries, 1, 1);
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin,
                              ReduceOp::kMax, ReduceOp::kProduct, ReduceOp::kAdasum}) {
      Buffer output;
      ASSERT_EQ(job[0].Run(Reducing(op, 1, 1), &output, {in_place}).message, "");
      EXPECT_EQ(FromBytes<float>(output), (std::vector<float>{1, 2, 4}));
    }
    EXPECT_EQ(CountCalls(libraries, "cuMemcpyDtoDAsync"), in_place ? 0 : 6);
    EXPECT_EQ(CountCalls(libraries, "cuMemcpyDtoHAsync"), 0);
  }
}

// NCCL refuses a scaled sum there.
TEST(GpuOneRankTest, ScalesAreApplied) {
  const StandIn libraries;
  GpuJob job(libraries, 1, 1);
  Buffer output;
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMax}) {
    ASSERT_EQ(job[0].Run(Reducing(op, 0.5, 1), &output).message, "");
    EXPECT_EQ(FromBytes<float>(output), (std::vector<float>{0.5, 1, 2}));
    ASSERT_EQ(job[0].Run(Reducing(op, 1, 4), &output).message, "");
    EXPECT_EQ(FromBytes<float>(output), (std::vector<float>{4, 8, 16}));
  }
  ASSERT_EQ(job[0].Run(AverageOfFloat8(), &output).message, "");
  EXPECT_EQ(output, AverageOfFloat8().input);
  ExpectNoNccl(libraries);
}

TEST(GpuOneRankTest, ASetBesideTheCommunicatorOfAllRanksGetsNoPartOfIt) {
  const StandIn libraries;
  GpuJob job(libraries, 3, 1);
  job.Connect();
  const int64_t reductions = CountCalls(libraries, "ncclAllReduce");
  job.ForEach([](GpuRank& self, int rank) {
    int32_t alone = 0, two = 0;
    ASSERT_EQ(self.engine().AddProcessSet({1}, &alone).message, "");
    Buffer output;
    if (rank == 1) {
      ASSERT_EQ(
          self.Run(In(alone, Reducing(ReduceOp::kAverage, 2, 1)), &output).message, "");
      EXPECT_EQ(FromBytes<float>(output), (std::vector<float>{2, 4, 8}));
      ASSERT_EQ(self.Run(In(alone, Gather("g", {5, 6})), &output).message, "");
      EXPECT_EQ(FromBytes<int32_t>(output), (std::vector<int32_t>{5, 6}));
    }
    ASSERT_EQ(self.engine().AddProcessSet({0, 1}, &two).message, "");
    if (rank < 2) {
      ASSERT_EQ(self.Run(In(two, Sum("x", {1})), &output).message, "");
      EXPECT_EQ(FromBytes<float>(output), std::vector<float>{2});
    }
    ASSERT_EQ(self.engine().RemoveProcessSet(alone).message, "");
  });
  // That of two is tried out and used.
  EXPECT_EQ(CountCalls(libraries, "ncclAllReduce"), reductions + 2 * 2);
  // For the communicator of all ranks, too.
  EXPECT_EQ(CountCalls(libraries, "ncclCommSplit"), 3 + 3);
}

TEST(GpuOneRankTest, ARankWithoutMemoryForItsResultSaysSo) {
  const StandIn libraries;
  GpuJob job(libraries, 1, 1);
  Ask ask = Gather("g", {5, 6});
  ask.has_memory = false;
  Buffer output;
  EXPECT_FALSE(job[0].Run(ask, &output).ok());
  ask.has_memory = true;
  EXPECT_EQ(job[0].Run(ask, &output).message, "");
  EXPECT_EQ(FromBytes<int32_t>(output), (std::vector<int32_t>{5, 6}));
}

}  // namespace
}  // namespace keras_hvd
