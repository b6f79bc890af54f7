// The engine with tensors on GPUs where something fails: an end of everything, on all
// ranks, and no memory that is used too early.
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tf_ops/engine/engine_gpu_testing.h"

namespace keras_hvd {
namespace {

using stand_in::StandIn;

TEST(GpuFailureTest, ATensorElsewhereOnAnotherRankIsAnErrorOnAll) {
  const StandIn libraries;
  GpuJob job(libraries, 2, 1);
  job.ForEach([](GpuRank& self, int rank) {
    Buffer output;
    const Status status = rank == 0 ? self.Run(Sum("x", {1}), &output)
                                    : self.RunOnCpu(Sum("x", {1}), &output);
    EXPECT_EQ(status.code, Code::kMismatch);
    EXPECT_TRUE(Contains(status.message, "float32[1] on a GPU")) << status.message;
    EXPECT_EQ(self.Run(Sum("x", {1}), &output).message, "");
  });
}

TEST(GpuFailureTest, MemoryThatOneRankDoesNotHaveFailsThereAlone) {
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

TEST(GpuFailureTest, ADeathEndsWhatRunsAndPoisonsTheEngine) {
  const StandIn libraries;
  for (const bool deferred : {false, true}) {
    GpuJob job(libraries, 3, 1);
    job.Connect();
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
    job.state(0).Fail(Code::kRankFailed, "rank 2 died", 2);
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

// Not functions that only end things, or report others' errors; nor those that make
// communicators, which can be done without.
bool CanFail(const std::string& function) {
  static const std::set<std::string> kCannot = {
      "ncclCommAbort",      "ncclCommDestroy",        "ncclCommFinalize",
      "ncclGetErrorString", "ncclGetLastError",       "ncclRedOpDestroy",
      "ncclGetVersion",     "ncclCommGetAsyncError",  "ncclGetUniqueId",
      "ncclCommSplit",      "ncclCommInitRankConfig",
  };
  return function.rfind("nccl", 0) == 0 && kCannot.count(function) == 0;
}

TEST(GpuFailureTest, EachErrorOfNcclAtEachFunctionEndsTheJobOnAllRanks) {
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
      job.Connect();
      stand_in::Injection injection;
      injection.function = function;
      injection.code = code;
      // These are of no communicator: the first call fails, whoever makes it.
      const bool of_nobody = function == "ncclGroupStart" || function == "ncclGroupEnd";
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
  EXPECT_GE(tried, 6 * 9);
}

TEST(GpuFailureTest, AnErrorThatNcclMeetsLaterEndsTheJob) {
  const StandIn libraries;
  GpuJob job(libraries, 2, 1);
  job.Connect();
  stand_in::Injection injection;
  injection.function = "ncclAllReduce";
  injection.code = 6;
  injection.asynchronous = true;
  injection.member = 1;
  libraries->Inject(injection);
  job.ForEach([&](GpuRank& self, int) {
    static_cast<void>(self.End(self.Submit(Sum("x", {1}))));
    // Hanging work is ended, but not before everybody can know that its result is worth
    // nothing.
    self.Synchronize();
    EXPECT_TRUE(job.state().Failed());
    Buffer output;
    EXPECT_FALSE(self.Run(Sum("later", {1}), &output).ok());
  });
}

// A caller that is told of the error frees the buffers.
TEST(GpuFailureTest, AStreamThatCannotBeToldToWaitIsWaitedForByItsCaller) {
  const StandIn libraries;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    GpuJob job(libraries, 2, seed);
    job.Connect();
    stand_in::Injection injection;
    injection.function = "cuStreamWaitEvent";
    injection.code = static_cast<int32_t>(stand_in::kOutOfMemory);
    injection.rank = 0;
    injection.thread = "caller";
    libraries->Inject(injection);
    job.ForEach([](GpuRank& self, int rank) {
      const size_t number = self.Submit(Sum("x", {1, 2}), {false, true});
      ASSERT_EQ(self.End(number).message, "");
      EXPECT_EQ(self.TryToAwait(number).ok(), rank == 1);
      EXPECT_EQ(FromBytes<float>(self.Output(number)), (std::vector<float>{2, 4}));
    });
  }
}

// A request that failed on one rank for want of memory gives its input to the others
// first.
TEST(GpuFailureTest, AnInputIsGivenBeforeTheMemoryOfWhatFailedIsUsedAgain) {
  const StandIn libraries;
  for (const bool deferred : {false, true}) {
    GpuJob job(libraries, 2, 1);
    job.Connect();
    libraries->HoldCollectives(1, true);
    std::vector<size_t> numbers(2);
    job.ForEach([&](GpuRank& self, int rank) {
      Ask ask = Gather("x", {1, 2});
      ask.has_memory = rank != 1;
      numbers[rank] = self.Submit(ask, {false, deferred && rank == 1});
      EXPECT_EQ(self.End(numbers[rank]).ok(), rank == 0);
    });
    // All work that could go first does.
    job.ForEach([&](GpuRank& self, int rank) {
      if (rank == 1)
        libraries->Synchronize(self.stream(), std::chrono::milliseconds(200));
    });
    libraries->HoldCollectives(1, false);
    EXPECT_EQ(FromBytes<int32_t>(job[0].Output(numbers[0])),
              (std::vector<int32_t>{1, 2, 1, 2}));
  }
}

TEST(GpuFailureTest, EachErrorOfCudaInTheEngineEndsTheJobOnAllRanks) {
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
  // Functions that end things or report others' errors; the device is open already.
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
      // A rank that had ended before finds out with its next request.
      const bool has_failed = job.state().Failed();
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
TEST(GpuFailureTest, WhatIsGivenUpFreesNoMemoryBeforeNcclIsAborted) {
  const StandIn libraries;
  GpuJob job(libraries, 2, 1);
  job.Connect();
  libraries->HoldCollectives(1, true);
  std::atomic<int> submitted{0};
  std::thread death([&] {
    while (submitted.load() < 2) sched_yield();
    while (FirstCall(libraries->Calls(), "cuMemcpyDtoHAsync") < 0) sched_yield();
    job.state(0).Fail(Code::kRankFailed, "rank 1 died", 1);
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

// The engines' threads are inside NCCL, which has no room for their work.
TEST(GpuFailureTest, ADeathIsHeardInsideOfACallIntoAFullQueue) {
  constexpr int kRoom = 2;
  const StandIn libraries;
  for (const Layout& layout : {Layout{{0, 0}}, Layout{{0, 1}}, Layout{{0, 1, 1}, 1}}) {
    const int size = layout.size();
    for (int dead = 0; dead < size; ++dead) {
      GpuJob job(libraries, layout, dead + 1);
      job.Connect();
      libraries->LimitQueue(kRoom);
      libraries->HoldCollectives(dead, true);
      const int64_t groups = CountCalls(libraries, "ncclGroupEnd");
      std::vector<std::vector<size_t>> numbers(size);
      job.ForEach([&](GpuRank& self, int rank) {
        for (int i = 0; i < kRoom + 2; ++i) {
          const Ask ask = Sum("held " + std::to_string(i), {1});
          numbers[rank].push_back(self.Submit(ask, {true, true}));
          // So that each is a group of its own.
          if (i >= kRoom) continue;
          ASSERT_TRUE(self.End(numbers[rank][i]).ok());
        }
      });
      EXPECT_TRUE(Eventually([&] {
        return CountCalls(libraries, "ncclGroupEnd") == groups + size * (kRoom + 1);
      }));
      const Clock::time_point died = Clock::now();
      job.state((dead + 1) % size).Fail(Code::kRankFailed, "it has died", dead);
      job.ForEach([&](GpuRank& self, int rank) {
        for (int i = 0; i < kRoom + 2; ++i) {
          const Status status = self.End(numbers[rank][i]);
          EXPECT_EQ(status.ok(), i < kRoom) << status.message;
          EXPECT_EQ(Contains(status.message, "it has died"), i >= kRoom);
        }
        for (int i = 0; i < kRoom; ++i) self.Await(numbers[rank][i]);
        self.Synchronize();
      });
      EXPECT_LT(Clock::now() - died, std::chrono::seconds(2));
      libraries->HoldCollectives(dead, false);
    }
  }
}

// The GPU notices an abort seconds later. Nobody without work there has to wait for
// that: neither a caller that drives nor others.
TEST(GpuFailureTest, WhatHasNotBegunEndsBeforeASlowAbort) {
  constexpr std::chrono::seconds kLate(4);
  constexpr int kRoom = 2;
  const StandIn libraries;
  for (const bool in_a_call : {false, true}) {
    GpuJob job(libraries, 3, 1);
    job.Connect();
    libraries->HoldCollectives(2, true);
    if (in_a_call) libraries->LimitQueue(kRoom);
    libraries->SlowAborts(kLate);
    const int64_t groups = CountCalls(libraries, "ncclGroupEnd");
    const int held = in_a_call ? kRoom + 1 : kRoom;
    std::vector<std::vector<size_t>> numbers(3);
    job.ForEach([&](GpuRank& self, int rank) {
      for (int i = 0; i < held; ++i) {
        numbers[rank].push_back(
            self.Submit(Sum("held " + std::to_string(i), {1}), {true, true}));
        if (i == kRoom) break;
        ASSERT_TRUE(self.End(numbers[rank][i]).ok());
      }
    });
    EXPECT_TRUE(Eventually(
        [&] { return CountCalls(libraries, "ncclGroupEnd") == groups + 3 * held; }));
    std::atomic<int> waiting{0};
    Clock::time_point died;
    std::thread death([&] {
      while (waiting.load() < 2) sched_yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      died = Clock::now();
      job.state().Fail(Code::kRankFailed, "rank 2 died", 2);
    });
    job.ForEach([&](GpuRank& self, int rank) {
      // Not on the one that has died.
      if (rank == 2) return;
      const size_t pending = self.Submit(Sum("pending", {1}));
      std::thread driver([&] {
        waiting += 1;
        Buffer output;
        EXPECT_TRUE(
            Contains(self.Run(Sum("driver", {1}), &output).message, "rank 2 died"));
        EXPECT_LT(Clock::now() - died, std::chrono::seconds(2));
      });
      EXPECT_TRUE(Contains(self.End(pending).message, "rank 2 died"));
      EXPECT_LT(Clock::now() - died, std::chrono::seconds(2));
      driver.join();
      EXPECT_LT(Clock::now() - died, std::chrono::seconds(2));
    });
    death.join();
    job.ForEach([&](GpuRank& self, int rank) {
      // Its memory may be in use until the abort's end.
      if (in_a_call) {
        EXPECT_TRUE(Contains(self.End(numbers[rank][kRoom]).message, "rank 2 died"));
      }
      for (int i = 0; i < kRoom; ++i) self.Await(numbers[rank][i]);
      self.Synchronize();
    });
    libraries->HoldCollectives(2, false);
  }
}

// It shares the flag for aborts with the communicator of all ranks, on which more may
// be under way.
TEST(GpuFailureTest, APartThatCannotBeGivenBackIsAbortedWhenAllKnow) {
  const StandIn libraries;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    GpuJob job(libraries, 3, seed);
    job.Connect();
    std::vector<int32_t> ids(3);
    job.ForEach([&](GpuRank& self, int rank) {
      ASSERT_EQ(self.engine().AddProcessSet({0, 1}, &ids[rank]).message, "");
    });
    libraries->HoldCollectives(2, true);
    stand_in::Injection injection;
    injection.function = "ncclCommFinalize";
    injection.code = 3;
    injection.rank = 1;
    libraries->Inject(injection);
    std::atomic<int> ended{0}, unknown{0};
    job.ForEach([&](GpuRank& self, int rank) {
      const size_t number = self.Submit(Sum("held", {1}), {false, true});
      ASSERT_EQ(self.End(number).message, "");
      self.Await(number);
      libraries->Enqueue(self.stream(), [&] {
        ended += 1;
        if (!job.state().Failed()) unknown += 1;
      });
      EXPECT_FALSE(self.engine().RemoveProcessSet(ids[rank]).ok() && rank == 1);
      self.Synchronize();
    });
    EXPECT_EQ(ended.load(), 3);
    EXPECT_EQ(unknown.load(), 0);
    libraries->HoldCollectives(2, false);
  }
}

TEST(GpuFailureTest, ACommunicatorIsSplitWhenNothingOfItIsUnderWay) {
  const StandIn libraries;
  GpuJob job(libraries, 3, 1);
  libraries->HoldCollectives(1, true);
  std::vector<size_t> numbers(3);
  job.ForEach([&](GpuRank& self, int rank) {
    numbers[rank] = self.Submit(Sum("held", {1}), {false, true});
    ASSERT_EQ(self.End(numbers[rank]).message, "");
  });
  const auto splits = [&] {
    const std::vector<stand_in::Call> calls = libraries->Calls();
    return std::count_if(calls.begin(), calls.end(), [](const stand_in::Call& call) {
      return call.function == "ncclCommSplit";
    });
  };
  const auto before = splits();
  std::thread release([&] {
    const auto until = Clock::now() + std::chrono::milliseconds(200);
    while (Clock::now() < until && splits() == before) sched_yield();
    EXPECT_EQ(splits(), before);
    libraries->HoldCollectives(1, false);
  });
  job.ForEach([&](GpuRank& self, int rank) {
    int32_t id;
    EXPECT_EQ(self.engine().AddProcessSet({0, 1}, &id).message, "");
    self.Await(numbers[rank]);
    EXPECT_EQ(FromBytes<float>(self.Output(numbers[rank])), std::vector<float>{3});
  });
  release.join();
  EXPECT_GT(splits(), before);
}

TEST(GpuFailureTest, AThreadsOwnDefaultStreamIsRefused) {
  const StandIn libraries;
  GpuJob job(libraries, 1, 1);
  Operation operation;
  const Status status =
      job[0].engine().SetStreamPoint(cuda::kStreamPerThread, nullptr, &operation);
  EXPECT_EQ(status.code, Code::kInvalidArgument);
  EXPECT_TRUE(Contains(status.message, "CU_STREAM_PER_THREAD")) << status.message;
}

}  // namespace
}  // namespace keras_hvd
