// The engine with tensors on GPUs: right results whatever the GPU's streams do first,
// by NCCL and through host memory, and nobody that waits for the GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "tf_ops/collectives/numbers_testing.h"
#include "tf_ops/engine/gpu_plan_testing.h"

namespace keras_hvd {
namespace {

using stand_in::StandIn;

// The CPU's results, but for the rounding of a scale by which NCCL multiplies.
bool HasNearResult(const Plan& plan, size_t index, const Buffer& output) {
  const Description& description = plan.asks[index].description;
  const DataType dtype = description.tensors.front().dtype;
  if (!Reduces(description.kind) || !IsFloating(dtype) || IsFloat8(dtype)) {
    return HasResult(plan, index, output);
  }
  const std::vector<double> got = Decoded(dtype, output);
  const std::vector<double> want = Decoded(dtype, plan.expected[index]);
  return std::equal(
      got.begin(), got.end(), want.begin(), want.end(), [&](double one, double other) {
        return std::abs(one - other) <= Tolerance(dtype) * std::abs(other);
      });
}

// ---- Results

class GpuResultTest : public testing::TestWithParam<int> {};

TEST_P(GpuResultTest, AreRightInAnyOrderOfTheStreams) {
  const int size = GetParam();
  const StandIn libraries;
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    const std::vector<Plan> plans = GpuPlans(size, seed, 35, FillWithSmallNumbers);
    GpuJob job(libraries, size, seed);
    job.ForEach(
        [&](GpuRank& self, int rank) { RunAll(&self, rank, plans, HasNearResult); });
  }
}

TEST_P(GpuResultTest, OfGpusAndOfTheCpuMix) {
  const int size = GetParam();
  const StandIn libraries;
  GpuJob job(libraries, size, 3);
  job.ForEach([&](GpuRank& self, int rank) {
    for (int step = 0; step < 20; ++step) {
      const std::vector<float> values(1000, static_cast<float>(rank + step));
      const float sum = static_cast<float>(size * step + size * (size - 1) / 2);
      Buffer output;
      ASSERT_EQ(self.Run(Sum("gpu", values), &output).message, "");
      ASSERT_EQ(FromBytes<float>(output), std::vector<float>(1000, sum));
      ASSERT_EQ(self.RunOnCpu(Sum("cpu", values), &output).message, "");
      ASSERT_EQ(FromBytes<float>(output), std::vector<float>(1000, sum));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, GpuResultTest, testing::Range(1, 5));

TEST(GpuTest, RanksThatHaveJoinedGiveZeros) {
  const StandIn libraries;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    GpuJob job(libraries, 3, seed);
    job.ForEach([&](GpuRank& self, int rank) {
      for (int step = 0; step < 2 + 3 * rank; ++step) {
        Buffer output;
        const std::string name = "step " + std::to_string(step);
        ASSERT_EQ(self.Run(Sum(name, {1, 2, 3}), &output).message, "");
        const float ranks = step < 2 ? 3 : step < 5 ? 2 : 1;
        EXPECT_EQ(FromBytes<float>(output),
                  (std::vector<float>{ranks, 2 * ranks, 3 * ranks}));
      }
      int32_t last = -1;
      EXPECT_EQ(self.engine().Join(&last).message, "");
      EXPECT_EQ(last, 2);
    });
  }
}

TEST(GpuTest, ProcessSetsOverlapAndComeAndGo) {
  const StandIn libraries;
  for (const bool before : {true, false}) {
    GpuJob job(libraries, 3, before ? 5 : 6);
    job.ForEach([&](GpuRank& self, int rank) {
      Buffer output;
      // Sets get a part of the communicator of all ranks, where there is one already.
      if (before) {
        ASSERT_EQ(self.Run(Sum("all", {1}), &output).message, "");
      }
      int32_t low = -1, high = -1;
      ASSERT_TRUE(self.engine().AddProcessSet({0, 1}, &low).ok());
      ASSERT_TRUE(self.engine().AddProcessSet({1, 2}, &high).ok());
      for (int step = 0; step < 10; ++step) {
        std::vector<size_t> numbers;
        for (const int32_t id : {low, high}) {
          if ((id == low && rank == 2) || (id == high && rank == 0)) continue;
          Ask ask = Sum("of a set", {static_cast<float>(rank)});
          ask.description.process_set = id;
          numbers.push_back(self.Submit(ask));
          ASSERT_EQ(self.End(numbers.back()).message, "");
          EXPECT_EQ(FromBytes<float>(self.Output(numbers.back())),
                    std::vector<float>{id == low ? 1.0f : 3.0f});
        }
        ASSERT_EQ(self.Run(Sum("all", {1}), &output).message, "");
      }
      ASSERT_TRUE(self.engine().RemoveProcessSet(low).ok());
      ASSERT_TRUE(self.engine().RemoveProcessSet(high).ok());
    });
  }
}

// ---- Waiting

TEST(GpuTest, NobodyWaitsForTheGpu) {
  const StandIn libraries;
  GpuJob job(libraries, 2, 1);
  Buffer output;
  job.Connect();
  // The inputs of rank 1 do not come to be.
  libraries->Hold(job[1].stream(), true);
  std::vector<size_t> numbers(2);
  job.ForEach([&](GpuRank& self, int rank) {
    for (int i = 0; i < 10; ++i) {
      numbers[rank] = self.Submit(Sum("x" + std::to_string(i), {1, 2}));
      EXPECT_EQ(self.End(numbers[rank]).message, "");
    }
  });
  libraries->Hold(job[1].stream(), false);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(FromBytes<float>(job[rank].Output(numbers[rank])),
              (std::vector<float>{2, 4}));
  }
}

int64_t AllreducesOn(const StandIn& libraries, cuda::Stream stream) {
  const std::vector<stand_in::Call> calls = libraries->Calls();
  return std::count_if(calls.begin(), calls.end(), [&](const stand_in::Call& call) {
    return call.function == "ncclAllReduce" && call.stream == stream;
  });
}

// To go to another stream and back takes a GPU as long as a small collective.
TEST(GpuTest, ACallerThatDrivesGetsItsResultOnItsOwnStream) {
  const StandIn libraries;
  GpuJob job(libraries, 2, 1);
  job.Connect();
  // Peers may be late, and the engine's thread then does the work.
  constexpr int kMost = 2000;
  std::atomic<int> steps{kMost};
  job.ForEach([&](GpuRank& self, int rank) {
    for (int step = 0; step < steps.load(); ++step) {
      const bool deferred = step % 3 == 2;
      const auto own = static_cast<float>(step + rank);
      Buffer output;
      ASSERT_EQ(
          self.Run(Sum("w", {own}), &output, {step % 2 == 0, deferred, true}).message,
          "");
      EXPECT_EQ(FromBytes<float>(output), std::vector<float>{2.0f * step + 1});
      if (rank == 0 && steps.load() == kMost &&
          AllreducesOn(libraries, job[0].stream()) >= 3) {
        steps.store(step + 3);
      }
    }
  });
  EXPECT_GE(AllreducesOn(libraries, job[0].stream()), 3);
}

// The caller's stream, of the last collective, may be gone by then.
TEST(GpuTest, APartIsTriedOutOnTheEnginesStream) {
  const StandIn libraries;
  GpuJob job(libraries, 3, 1);
  job.Connect();
  const GpuMode drives = {false, false, true};
  job.ForEach([&](GpuRank& self, int rank) {
    for (int step = 0; step < 2000; ++step) {
      Buffer output;
      // All ranks stop in the same step.
      const float own =
          rank == 0 && AllreducesOn(libraries, job[0].stream()) > 0 ? 1 : 0;
      ASSERT_EQ(self.Run(Sum("w", {own}), &output, drives).message, "");
      if (FromBytes<float>(output)[0] > 0) break;
    }
  });
  const auto before = AllreducesOn(libraries, job[0].stream());
  EXPECT_GT(before, 0);
  job.ForEach([](GpuRank& self, int) {
    int32_t id;
    EXPECT_EQ(self.engine().AddProcessSet({0, 1}, &id).message, "");
  });
  EXPECT_EQ(AllreducesOn(libraries, job[0].stream()), before);
}

TEST(GpuTest, BackpropGoesOnWhileADeferredCollectiveRuns) {
  const StandIn libraries;
  GpuJob job(libraries, 2, 1);
  libraries->HoldCollectives(1, true);
  std::vector<size_t> numbers(2);
  job.ForEach([&](GpuRank& self, int rank) {
    numbers[rank] = self.Submit(Sum("bucket", {1, 2}), {false, true});
    EXPECT_EQ(self.End(numbers[rank]).message, "");
    std::atomic<bool> ran{false};
    libraries->Enqueue(self.stream(), [&] { ran.store(true); });
    self.Synchronize();
    EXPECT_TRUE(ran.load());
  });
  libraries->HoldCollectives(1, false);
  for (int rank = 0; rank < 2; ++rank) {
    job[rank].Await(numbers[rank]);
    EXPECT_EQ(FromBytes<float>(job[rank].Output(numbers[rank])),
              (std::vector<float>{2, 4}));
  }
}

// ---- Host memory

TEST(GpuTest, WithoutNcclOnOneRankAllGoThroughHostMemory) {
  const StandIn libraries;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    const std::vector<Plan> plans = GpuPlans(2, seed, 25, FillWithSmallNumbers);
    CapturedErrors errors;
    {
      GpuJob job(libraries, 2, seed, [](EngineOptions* options, int rank) {
        if (rank == 1) options->gpu_libraries.nccl = "/no/libnccl.so.2";
      });
      job.ForEach([&](GpuRank& self, int rank) {
        for (const Plan& plan : plans) {
          const Ask& ask = plan.asks[rank];
          if (!HasOwnRows(ask.description.kind) &&
              ask.description.kind != Kind::kAllreduce) {
            continue;
          }
          Buffer output;
          ASSERT_EQ(self.Run(ask, &output).message, "");
          EXPECT_EQ(output, plan.expected[rank]) << Details(ask.description);
        }
      });
      EXPECT_TRUE(errors.AwaitText("/no/libnccl.so.2"));
    }
    const std::string text = errors.text();
    const size_t first = text.find("go through host memory");
    EXPECT_NE(first, std::string::npos) << text;
    EXPECT_EQ(text.find("go through host memory", first + 1), std::string::npos);
  }
}

Ask SumOfFloat8(const std::string& name) {
  Ask ask = Sum(name, {});
  ask.description.tensors = {{DataType::kFloat8E4m3fn, {3}}};
  ask.input = {0x38, 0x40, 0x30};  // 1, 2, 0.5
  return ask;
}

TEST(GpuTest, Float8IsReducedByNcclWhereAllMembersCan) {
  const StandIn libraries;
  struct Case {
    int version;
    int capability_of_rank_1;
    bool by_nccl;
  };
  for (const Case& each : {Case{22400, 90, true}, Case{22400, 100, true},
                           Case{22400, 89, false}, Case{22399, 90, false}}) {
    GpuJob job(libraries, 2, 1);
    libraries->SetNcclVersion(each.version);
    libraries->SetComputeCapability(0, 90);
    libraries->SetComputeCapability(1, each.capability_of_rank_1);
    job.ForEach([](GpuRank& self, int) {
      Buffer output;
      ASSERT_EQ(self.Run(SumOfFloat8("x"), &output).message, "");
      EXPECT_EQ(output, (Buffer{0x40, 0x48, 0x38}));
    });
    // Besides that of each rank which tries the communicator out.
    EXPECT_EQ(CountCalls(libraries, "ncclAllReduce"), each.by_nccl ? 4 : 2)
        << each.version << ", " << each.capability_of_rank_1;
  }
}

TEST(GpuTest, AnNcclThatIsTooOldIsNotUsed) {
  const StandIn libraries;
  CapturedErrors errors;
  GpuJob job(libraries, 2, 1);
  libraries->SetNcclVersion(21805);
  job.ForEach([](GpuRank& self, int) {
    Buffer output;
    ASSERT_EQ(self.Run(Sum("x", {1}), &output).message, "");
    EXPECT_EQ(FromBytes<float>(output), std::vector<float>{2});
  });
  EXPECT_TRUE(errors.AwaitText("2.18.5"));
}

TEST(GpuTest, RanksThatShareAGpuUseNcclWhereItAllowsThat) {
  const StandIn libraries;
  for (const bool allowed : {false, true}) {
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", allowed ? "1" : "0", 1);
    CapturedErrors errors;
    GpuJob job(libraries, 3, 1, [](EngineOptions*, int) {}, 2);
    libraries->SetNcclVersion(23003);
    job.ForEach([](GpuRank& self, int) {
      Buffer output;
      ASSERT_EQ(self.Run(Sum("x", {1}), &output).message, "");
      EXPECT_EQ(FromBytes<float>(output), std::vector<float>{3});
    });
    EXPECT_EQ(FunctionsOf(libraries).count("ncclAllReduce"), allowed ? 1 : 0);
    if (!allowed) {
      EXPECT_TRUE(errors.AwaitText("[rank 0] warning: collectives of tensors on GPUs"));
      EXPECT_TRUE(Contains(errors.text(), "this rank shares the GPU of rank 2"));
    }
  }
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
}

// As at the end of a bucket of gradients, where it stands for the common properties.
TEST(GpuTest, AnEmptyTensorOfAnotherTypeKeepsNoGroupFromNccl) {
  const StandIn libraries;
  GpuJob job(libraries, 2, 1);
  Ask ask = Sum("bucket", {1, 3});
  ask.description.reduction.op = ReduceOp::kAverage;
  TensorDescription& end = ask.description.tensors.emplace_back();
  end.dtype = DataType::kUint8;
  end.shape = {0, 7};
  job.ForEach([&](GpuRank& self, int) {
    Buffer output;
    ASSERT_EQ(self.Run(ask, &output).message, "");
    EXPECT_EQ(FromBytes<float>(output), (std::vector<float>{1, 3}));
  });
  // One for each rank, and before that the one that tries the communicator out.
  EXPECT_EQ(CountCalls(libraries, "ncclAllReduce"), 2 * 2);
}

TEST(GpuTest, ResultsAreComparedWhereThisIsAsked) {
  const StandIn libraries;
  GpuJob job(libraries, 3, 2,
             [](EngineOptions* options, int) { options->check = true; });
  job.ForEach([](GpuRank& self, int rank) {
    for (int step = 0; step < 5; ++step) {
      Buffer output;
      ASSERT_EQ(self.Run(Sum("x", {1, 2}), &output).message, "");
      EXPECT_EQ(FromBytes<float>(output), (std::vector<float>{3, 6}));
      ASSERT_EQ(
          self.Run(Gather("g", std::vector<int32_t>(rank + 1, rank)), &output).message,
          "");
      EXPECT_EQ(FromBytes<int32_t>(output), (std::vector<int32_t>{0, 1, 1, 2, 2, 2}));
    }
  });
}

}  // namespace
}  // namespace keras_hvd
