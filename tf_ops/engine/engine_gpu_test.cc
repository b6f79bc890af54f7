// The engine with tensors on GPUs: right results whatever the GPU's streams do first,
// nobody that waits for the GPU, and an end of everything where something fails.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tf_ops/collectives/number.h"
#include "tf_ops/engine/engine_gpu_testing.h"
#include "tf_ops/engine/random_plan_testing.h"

namespace keras_hvd {
namespace {

using stand_in::StandIn;

template <typename T, typename Number>
void FillAs(Buffer* elements, std::mt19937_64* random) {
  const int64_t count = static_cast<int64_t>(elements->size() / sizeof(T));
  for (int64_t i = 0; i < count; ++i) {
    T element;
    Narrow(static_cast<Number>((*random)() % 4), &element);
    memcpy(elements->data() + i * sizeof(T), &element, sizeof(T));
  }
}

// Of which NCCL's sums have the CPU's bits, whatever is rounded when.
void FillWithSmallNumbers(DataType dtype, Buffer* elements, std::mt19937_64* random) {
  switch (dtype) {
    case DataType::kUint8:
    case DataType::kInt8:
      return FillAs<int8_t, int8_t>(elements, random);
    case DataType::kInt32:
      return FillAs<int32_t, int32_t>(elements, random);
    case DataType::kInt64:
      return FillAs<int64_t, int64_t>(elements, random);
    case DataType::kFloat16:
      return FillAs<Float16, float>(elements, random);
    case DataType::kBfloat16:
      return FillAs<Bfloat16, float>(elements, random);
    case DataType::kFloat32:
      return FillAs<float, float>(elements, random);
    case DataType::kFloat64:
      return FillAs<double, double>(elements, random);
    case DataType::kBool:
      break;  // no plan has it
  }
}

template <typename T>
std::vector<double> Numbers(const Buffer& elements) {
  std::vector<double> numbers;
  for (const T element : FromBytes<T>(elements)) {
    numbers.push_back(static_cast<double>(Widen(element)));
  }
  return numbers;
}

// The CPU's results, but for the rounding of a scale by which NCCL multiplies.
void ExpectSame(const Description& description, const Buffer& output,
                const Buffer& expected) {
  const DataType dtype = description.tensors.front().dtype;
  std::vector<double> got, want;
  double tolerance = 0;
  if (Reduces(description.kind) && dtype == DataType::kFloat32) {
    got = Numbers<float>(output), want = Numbers<float>(expected), tolerance = 1e-6;
  } else if (Reduces(description.kind) && dtype == DataType::kFloat16) {
    got = Numbers<Float16>(output), want = Numbers<Float16>(expected), tolerance = 4e-3;
  } else if (Reduces(description.kind) && dtype == DataType::kBfloat16) {
    got = Numbers<Bfloat16>(output), want = Numbers<Bfloat16>(expected),
    tolerance = 3e-2;
  } else if (Reduces(description.kind) && dtype == DataType::kFloat64) {
    got = Numbers<double>(output), want = Numbers<double>(expected), tolerance = 1e-14;
  } else {
    EXPECT_EQ(output, expected) << Details(description);
    return;
  }
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], tolerance * std::abs(want[i])) << Details(description);
  }
}

// ---- Results

class GpuResultTest : public testing::TestWithParam<int> {};

TEST_P(GpuResultTest, AreRightInAnyOrderOfTheStreams) {
  const int size = GetParam();
  const StandIn libraries;
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<Plan> plans;
    for (int i = 0; i < 40; ++i) {
      plans.push_back(RandomPlan(i, size, &random, FillWithSmallNumbers));
    }
    GpuJob job(libraries, size, seed);
    job.ForEach([&](GpuRank& self, int rank) {
      std::vector<size_t> numbers;
      for (size_t i = 0; i < plans.size(); ++i) {
        const GpuMode mode = {i % 2 == 0, i % 3 == 0};
        if (plans[i].asks[rank].description.kind == Kind::kBarrier) continue;
        numbers.push_back(self.Submit(plans[i].asks[rank], mode));
      }
      size_t next = 0;
      for (size_t i = 0; i < plans.size(); ++i) {
        if (plans[i].asks[rank].description.kind == Kind::kBarrier) continue;
        const size_t number = numbers[next++];
        ASSERT_EQ(self.End(number).message, "");
        if (i % 3 == 0) self.Await(number);
      }
      next = 0;
      for (const Plan& plan : plans) {
        const Ask& ask = plan.asks[rank];
        if (ask.description.kind == Kind::kBarrier) continue;
        Buffer output = self.Output(numbers[next++]);
        Buffer expected = plan.expected[rank];
        if (ask.description.kind == Kind::kReducescatter) {
          const int64_t rows = ask.description.tensors.front().shape.front();
          const size_t own = PartSize(rows, rank, size) * 3 * sizeof(int32_t);
          output.resize(own), expected.resize(own);
        }
        ExpectSame(ask.description, output, expected);
      }
    });
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
  job.ForEach([](GpuRank& self, int) {
    Buffer connected;
    ASSERT_TRUE(self.Run(Sum("connects", {1}), &connected).ok());
  });
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

std::set<std::string> FunctionsOf(const StandIn& libraries) {
  std::set<std::string> functions;
  for (const stand_in::Call& call : libraries->Calls()) {
    functions.insert(call.function);
  }
  return functions;
}

TEST(GpuTest, WithoutNcclOnOneRankAllGoThroughHostMemory) {
  const StandIn libraries;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<Plan> plans;
    for (int i = 0; i < 30; ++i) {
      plans.push_back(RandomPlan(i, 2, &random, FillWithSmallNumbers));
    }
    CapturedErrors errors;
    {
      GpuJob job(libraries, 2, seed, [](EngineOptions* options) {
        if (options->rank == 1) options->gpu_libraries.nccl = "/no/libnccl.so.2";
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
    GpuJob job(libraries, 3, 1, [](EngineOptions*) {}, 2);
    libraries->SetNcclVersion(23003);
    job.ForEach([](GpuRank& self, int) {
      Buffer output;
      ASSERT_EQ(self.Run(Sum("x", {1}), &output).message, "");
      EXPECT_EQ(FromBytes<float>(output), std::vector<float>{3});
    });
    EXPECT_EQ(FunctionsOf(libraries).count("ncclAllReduce"), allowed ? 1 : 0);
    if (!allowed) {
      EXPECT_TRUE(errors.AwaitText("[rank 0] warning: collectives of tensors on GPUs"));
      EXPECT_TRUE(Contains(errors.text(), "this rank has the GPU of rank 2"));
    }
  }
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
}

// As at the end of a bucket of gradients, where it stands for what has to be alike.
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
  EXPECT_EQ(FunctionsOf(libraries).count("ncclAllReduce"), 1);
}

TEST(GpuTest, ResultsAreComparedWhereThisIsAsked) {
  const StandIn libraries;
  GpuJob job(libraries, 3, 2, [](EngineOptions* options) { options->check = true; });
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

// ---- Failures

TEST(GpuTest, ATensorElsewhereOnAnotherRankIsAnErrorOnAll) {
  const StandIn libraries;
  GpuJob job(libraries, 2, 1);
  job.ForEach([](GpuRank& self, int rank) {
    Buffer output;
    const Status status = rank == 0 ? self.Run(Sum("x", {1}), &output)
                                    : self.RunOnCpu(Sum("x", {1}), &output);
    EXPECT_EQ(status.code, Code::kInvalidArgument);
    EXPECT_TRUE(Contains(status.message, "float32[1] on a GPU")) << status.message;
    EXPECT_EQ(self.Run(Sum("x", {1}), &output).message, "");
  });
}

TEST(GpuTest, MemoryThatOneRankDoesNotHaveFailsThereAlone) {
  const StandIn libraries;
  GpuJob job(libraries, 2, 1);
  job.ForEach([](GpuRank& self, int rank) {
    Ask ask = Gather("x", {1, 2});
    ask.has_memory = rank != 1;
    Buffer output;
    const Status status = self.Run(ask, &output);
    EXPECT_EQ(status.ok(), rank == 0);
    if (rank == 1) {
      EXPECT_TRUE(Contains(status.message, "no memory"));
    }
    EXPECT_EQ(self.Run(Sum("next", {1}), &output).message, "");
  });
}

TEST(GpuTest, ADeathEndsWhatRunsAndPoisonsTheEngine) {
  const StandIn libraries;
  for (const bool deferred : {false, true}) {
    GpuJob job(libraries, 3, 1);
    job.ForEach([](GpuRank& self, int) {
      Buffer output;
      ASSERT_TRUE(self.Run(Sum("connects", {1}), &output).ok());
    });
    libraries->HoldCollectives(2, true);
    std::vector<size_t> numbers(3);
    job.ForEach([&](GpuRank& self, int rank) {
      numbers[rank] =
          self.Submit(Sum("grad/w", std::vector<float>(100, 1)), {false, deferred});
      ASSERT_TRUE(self.End(numbers[rank]).ok());
      if (deferred) self.Await(numbers[rank]);
    });
    // Both others wait on their streams for rank 2, which dies.
    const Clock::time_point died = Clock::now();
    job.segment().Fail(0, Code::kRankFailed, "rank 2 died", 2);
    job.ForEach([](GpuRank& self, int) { self.Synchronize(); });
    EXPECT_LT(Clock::now() - died, std::chrono::seconds(2));
    job.ForEach([](GpuRank& self, int) {
      Buffer output;
      const Status status = self.Run(Sum("later", {1}), &output);
      EXPECT_EQ(status.code, Code::kRankFailed);
      EXPECT_TRUE(Contains(status.message, "rank 2 died"));
    });
    libraries->HoldCollectives(2, false);
  }
}

Status RunEachKind(GpuRank* self, int rank) {
  Buffer output;
  Status status = self->Run(Sum("sum", {1, 2, 3}), &output);
  Ask scaled = Sum("scaled", {1, 2, 3});
  scaled.description.reduction.prescale = 0.5;
  if (status.ok()) status = self->Run(scaled, &output);
  if (status.ok()) status = self->Run(Gather("even", {1, 2}), &output);
  if (status.ok()) {
    status = self->Run(Gather("uneven", std::vector<int32_t>(rank + 1)), &output);
  }
  Ask exchange = Gather("exchange", {1, 2});
  exchange.description.kind = Kind::kAlltoall;
  exchange.splits = {1, 1};
  if (status.ok()) status = self->Run(exchange, &output);
  Ask scatter = Sum("scatter", {1, 2});
  scatter.description.kind = Kind::kReducescatter;
  if (status.ok()) status = self->Run(scatter, &output);
  Ask scatter_uneven = Sum("scatter uneven", {1, 2, 3});
  scatter_uneven.description.kind = Kind::kReducescatter;
  if (status.ok()) status = self->Run(scatter_uneven, &output);
  Ask average = Sum("average", {});
  average.description.tensors = {{DataType::kInt32, {2}}};
  average.description.reduction.op = ReduceOp::kAverage;
  average.input.resize(2 * sizeof(int32_t));
  if (status.ok()) status = self->Run(average, &output);
  int32_t id;
  if (status.ok()) status = self->engine().AddProcessSet({0}, &id);
  if (status.ok()) status = self->Run(Sum("last", {1}), &output);
  return status;
}

// What only ends things, or says what others have met.
bool CanFail(const std::string& function) {
  static const std::set<std::string> kCannot = {
      "ncclCommAbort",      "ncclCommDestroy",      "ncclCommFinalize",
      "ncclGetErrorString", "ncclGetLastError",     "ncclRedOpDestroy",
      "ncclGetVersion",     "ncclCommGetAsyncError"};
  return function.rfind("nccl", 0) == 0 && kCannot.count(function) == 0;
}

TEST(GpuTest, EachErrorOfNcclAtEachFunctionEndsTheJobOnAllRanks) {
  const StandIn libraries;
  std::set<std::string> functions;
  {
    GpuJob job(libraries, 2, 1);
    job.ForEach([](GpuRank& self, int rank) {
      EXPECT_EQ(RunEachKind(&self, rank).message, "");
    });
    functions = FunctionsOf(libraries);
  }
  int tried = 0;
  for (const std::string& function : functions) {
    if (!CanFail(function)) continue;
    for (int32_t code = 1; code <= 6; ++code) {
      GpuJob job(libraries, 2, 1);
      stand_in::Injection injection;
      injection.function = function;
      injection.code = code;
      // These are of no communicator: the first call fails, whoever makes it.
      const bool of_nobody = function == "ncclGetUniqueId" ||
                             function == "ncclCommInitRankConfig" ||
                             function == "ncclGroupStart" || function == "ncclGroupEnd";
      injection.member = of_nobody ? -1 : 1;
      libraries->Inject(injection);
      std::vector<Status> ends(2);
      job.ForEach(
          [&](GpuRank& self, int rank) { ends[rank] = RunEachKind(&self, rank); });
      for (const Status& end : ends) {
        EXPECT_FALSE(end.ok()) << function << " " << code;
        EXPECT_TRUE(Contains(end.message, function)) << end.message;
        EXPECT_TRUE(Contains(end.message, "NCCL_DEBUG")) << end.message;
      }
      ++tried;
    }
  }
  EXPECT_GE(tried, 6 * 12);
}

TEST(GpuTest, AnErrorThatNcclMeetsLaterEndsTheJob) {
  const StandIn libraries;
  GpuJob job(libraries, 2, 1);
  job.ForEach([](GpuRank& self, int) {
    Buffer output;
    ASSERT_TRUE(self.Run(Sum("connects", {1}), &output).ok());
  });
  stand_in::Injection injection;
  injection.function = "ncclAllReduce";
  injection.code = 6;
  injection.asynchronous = true;
  injection.member = 1;
  libraries->Inject(injection);
  job.ForEach([](GpuRank& self, int) {
    static_cast<void>(self.End(self.Submit(Sum("x", {1}))));
    // What hangs is ended.
    self.Synchronize();
    Buffer output;
    EXPECT_FALSE(self.Run(Sum("later", {1}), &output).ok());
  });
}

// A death while the communicator is made, which the peer has not come to.
TEST(GpuTest, ADeathEndsAnInitThatWaitsForThePeer) {
  const StandIn libraries;
  GpuJob job(libraries, 2, 1);
  // The one that is held makes no progress with anything of NCCL's.
  stand_in::Injection injection;
  injection.function = "ncclCommInitRankConfig";
  injection.code = static_cast<int32_t>(nccl::Result::kSystemError);
  libraries->Inject(injection);
  std::vector<size_t> numbers(2);
  for (int rank : {0, 1}) numbers[rank] = job[rank].Submit(Sum("x", {1}));
  for (int rank : {0, 1}) EXPECT_FALSE(job[rank].End(numbers[rank]).ok());
}

// What failed on one rank for want of memory gives its input to the others first.
TEST(GpuTest, AnInputIsGivenBeforeTheMemoryOfWhatFailedIsUsedAgain) {
  const StandIn libraries;
  for (const bool deferred : {false, true}) {
    GpuJob job(libraries, 2, 1);
    job.ForEach([](GpuRank& self, int) {
      Buffer output;
      ASSERT_TRUE(self.Run(Sum("connects", {1}), &output).ok());
    });
    libraries->HoldCollectives(1, true);
    std::vector<size_t> numbers(2);
    job.ForEach([&](GpuRank& self, int rank) {
      Ask ask = Gather("x", {1, 2});
      ask.has_memory = rank != 1;
      numbers[rank] = self.Submit(ask, {false, deferred && rank == 1});
      EXPECT_EQ(self.End(numbers[rank]).ok(), rank == 0);
    });
    // Whatever could go first does.
    job.ForEach([&](GpuRank& self, int rank) {
      if (rank == 1)
        libraries->Synchronize(self.stream(), std::chrono::milliseconds(200));
    });
    libraries->HoldCollectives(1, false);
    EXPECT_EQ(FromBytes<int32_t>(job[0].Output(numbers[0])),
              (std::vector<int32_t>{1, 2, 1, 2}));
  }
}

TEST(GpuTest, EachErrorOfCudaInTheEngineEndsTheJobOnAllRanks) {
  const StandIn libraries;
  std::set<std::string> functions;
  {
    GpuJob job(libraries, 2, 1);
    job.ForEach([](GpuRank& self, int rank) {
      EXPECT_EQ(RunEachKind(&self, rank).message, "");
    });
    for (const stand_in::Call& call : libraries->Calls()) {
      if (call.thread == "keras_hvd") functions.insert(call.function);
    }
  }
  // Those that end things or say what others have met; the device is open already.
  for (const char* const cannot :
       {"cuCtxPopCurrent", "cuMemFree", "cuMemFreeHost", "cuEventDestroy",
        "cuStreamDestroy", "cuDevicePrimaryCtxRelease"}) {
    functions.erase(cannot);
  }
  int failed = 0;
  for (const std::string& function : functions) {
    if (function.rfind("cu", 0) != 0) continue;
    for (const int call : {1, 2, 3, 5, 8, 13, 21}) {
      GpuJob job(libraries, 2, call);
      stand_in::Injection injection;
      injection.function = function;
      injection.code = static_cast<int32_t>(stand_in::kIllegalAddress);
      injection.call = call;
      injection.thread = "keras_hvd";
      libraries->Inject(injection);
      std::vector<Status> ends(2);
      job.ForEach(
          [&](GpuRank& self, int rank) { ends[rank] = RunEachKind(&self, rank); });
      // One that had ended before finds out with what comes next.
      const bool has_failed = job.segment().Failed();
      failed += has_failed ? 1 : 0;
      job.ForEach([&](GpuRank& self, int rank) {
        Buffer output;
        if (has_failed) ends[rank] = self.Run(Sum("after", {1}), &output);
        EXPECT_EQ(ends[rank].ok(), !has_failed) << function << " " << call;
        EXPECT_EQ(Contains(ends[rank].message, "CUDA failed in"), has_failed)
            << ends[rank].message;
      });
    }
  }
  EXPECT_GE(failed, 20);
}

int FirstCall(const std::vector<stand_in::Call>& calls, const std::string& function) {
  for (size_t i = 0; i < calls.size(); ++i) {
    if (calls[i].function == function) return static_cast<int>(i);
  }
  return -1;
}

// To free memory waits for the GPU, which would wait for the one that died.
TEST(GpuTest, WhatIsGivenUpFreesNoMemoryBeforeNcclIsAborted) {
  const StandIn libraries;
  GpuJob job(libraries, 2, 1);
  job.ForEach([](GpuRank& self, int) {
    Buffer output;
    ASSERT_TRUE(self.Run(Sum("connects", {1}), &output).ok());
  });
  libraries->HoldCollectives(1, true);
  std::atomic<int> submitted{0};
  std::thread death([&] {
    while (submitted.load() < 2) sched_yield();
    while (FirstCall(libraries->Calls(), "cuMemcpyDtoHAsync") < 0) sched_yield();
    job.segment().Fail(0, Code::kRankFailed, "rank 1 died", 1);
  });
  job.ForEach([&](GpuRank& self, int) {
    ASSERT_TRUE(self.End(self.Submit(Sum("held", {1}))).ok());
    Ask average = Sum("average", {});
    average.description.tensors = {{DataType::kInt32, {2}}};
    average.description.reduction.op = ReduceOp::kAverage;
    average.input.resize(2 * sizeof(int32_t));
    const size_t number = self.Submit(average);
    submitted += 1;
    EXPECT_EQ(self.End(number).code, Code::kRankFailed);
  });
  death.join();
  libraries->HoldCollectives(1, false);
  const std::vector<stand_in::Call> calls = libraries->Calls();
  EXPECT_GT(FirstCall(calls, "cuMemFreeHost"), FirstCall(calls, "ncclCommAbort"));
  EXPECT_GE(FirstCall(calls, "ncclCommAbort"), 0);
}

// The other would wait for it on its GPU for ever.
TEST(GpuTest, ARankThatLeavesBeforeItsGpuIsDoneEndsTheJob) {
  const StandIn libraries;
  GpuJob job(libraries, 2, 1);
  job.ForEach([](GpuRank& self, int) {
    Buffer output;
    ASSERT_TRUE(self.Run(Sum("connects", {1}), &output).ok());
  });
  libraries->HoldCollectives(1, true);
  job.ForEach([&](GpuRank& self, int) {
    ASSERT_TRUE(self.End(self.Submit(Sum("held", {1}))).ok());
  });
  job.Stop(1);
  job[0].Synchronize();
  const Status status = job[0].End(job[0].Submit(Sum("later", {1})));
  EXPECT_TRUE(Contains(status.message, "left the job in the middle of"))
      << status.message;
  EXPECT_TRUE(Contains(status.message, "'held'")) << status.message;
  libraries->HoldCollectives(1, false);
}

TEST(GpuTest, ACommunicatorIsSplitWhenNothingOfItIsUnderWay) {
  const StandIn libraries;
  GpuJob job(libraries, 2, 1);
  libraries->HoldCollectives(1, true);
  std::vector<size_t> numbers(2);
  job.ForEach([&](GpuRank& self, int rank) {
    numbers[rank] = self.Submit(Sum("held", {1}), {false, true});
    ASSERT_EQ(self.End(numbers[rank]).message, "");
  });
  std::thread release([&] {
    const auto until = Clock::now() + std::chrono::milliseconds(200);
    while (Clock::now() < until && FirstCall(libraries->Calls(), "ncclCommSplit") < 0) {
      sched_yield();
    }
    EXPECT_EQ(FirstCall(libraries->Calls(), "ncclCommSplit"), -1);
    libraries->HoldCollectives(1, false);
  });
  job.ForEach([&](GpuRank& self, int rank) {
    int32_t id;
    EXPECT_EQ(self.engine().AddProcessSet({0}, &id).message, "");
    self.Await(numbers[rank]);
    EXPECT_EQ(FromBytes<float>(self.Output(numbers[rank])), std::vector<float>{2});
  });
  release.join();
  EXPECT_GE(FirstCall(libraries->Calls(), "ncclCommSplit"), 0);
}

TEST(GpuTest, AThreadsOwnDefaultStreamIsRefused) {
  const StandIn libraries;
  GpuJob job(libraries, 1, 1);
  Operation operation;
  const Status status =
      job[0].engine().PlaceOnGpu(cuda::kStreamPerThread, nullptr, &operation);
  EXPECT_EQ(status.code, Code::kInvalidArgument);
  EXPECT_TRUE(Contains(status.message, "CU_STREAM_PER_THREAD")) << status.message;
}

}  // namespace
}  // namespace keras_hvd
