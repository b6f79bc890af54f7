// The engine with tensors on GPUs where a communicator cannot be made: all members
// carry them through host memory then, with the CPU's results, and one rank says so.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "tf_ops/engine/gpu_plan_testing.h"
#include "tf_ops/operation/log.h"

namespace keras_hvd {
namespace {

using stand_in::Injection;
using stand_in::StandIn;

const char* const kThroughHost = "go through host memory";
const char* const kInit = "ncclCommInitRankConfig";
const char* const kSplit = "ncclCommSplit";
const char* const kPoll = "ncclCommGetAsyncError";

void HoldAll(const StandIn& libraries, int size, bool on) {
  for (int member = 0; member < size; ++member) libraries->HoldProgress(member, on);
}

// ---- Failures

struct Failure {
  Injection injection;
  // All members wait for each other when it comes.
  bool in_the_midst = false;
  int speaker = -1;      // the rank that says so; -1: the first that comes to it
  std::string function;  // and of what
};

Failure AtMember(int member, const std::string& function, int32_t code,
                 bool asynchronous) {
  Failure failure;
  failure.injection = {function, code, member < 0 ? 0 : 1, asynchronous, member};
  failure.speaker = member;
  failure.function = function;
  return failure;
}

// The first, the last, or all members fail, at once, later, or by being asked.
std::vector<Failure> Failures(const std::string& function, int size, int32_t code) {
  std::vector<Failure> failures;
  for (const int member : {-1, 0, size - 1}) {
    for (const bool asynchronous : {false, true}) {
      failures.push_back(AtMember(member, function, code, asynchronous));
      if (member < 0) continue;
      Failure polled = AtMember(member, kPoll, code, asynchronous);
      if (asynchronous) polled.function = function;
      polled.in_the_midst = true;
      failures.push_back(polled);
    }
  }
  return failures;
}

// Where a communicator is tried out. The others' enqueued work hangs.
std::vector<Failure> FailuresOfTheFirstUse(int size, int32_t code) {
  std::vector<Failure> failures;
  for (const int member : {0, size - 1}) {
    failures.push_back(AtMember(member, "ncclAllReduce", code, false));
    Failure later = AtMember(member, "ncclAllReduce", code, true);
    later.function = "a collective that it had begun";
    failures.push_back(later);
  }
  for (const char* const function : {"ncclGroupStart", "ncclGroupEnd"}) {
    failures.push_back(AtMember(-1, function, code, false));
  }
  return failures;
}

// Makes a failure come during its lifetime.
class Failing {
 public:
  Failing(const StandIn& libraries, const Failure& failure, const std::string& function,
          int size)
      : libraries_(libraries) {
    if (!failure.in_the_midst) {
      libraries_->Inject(failure.injection);
      return;
    }
    HoldAll(libraries_, size, true);
    const int64_t calls = CountCalls(libraries_, function) + size;
    thread_ = std::thread([this, failure, function, calls, size] {
      EXPECT_TRUE(
          Eventually([&] { return CountCalls(libraries_, function) == calls; }));
      libraries_->Inject(failure.injection);
      HoldAll(libraries_, size, false);
    });
  }
  ~Failing() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  const StandIn& libraries_;
  std::thread thread_;
};

// ---- Effects

void ExpectSum(GpuRank* self, int32_t process_set, float own, float sum) {
  Buffer output;
  const Ask ask = In(process_set, Sum("sum", {own, 2 * own}));
  ASSERT_EQ(self->Run(ask, &output).message, "");
  EXPECT_EQ(FromBytes<float>(output), (std::vector<float>{sum, 2 * sum}));
}

// Not all of them, which are a set already.
std::vector<int> SomeRanks(int size) {
  return size == 2 ? std::vector<int>{0} : std::vector<int>{0, 1};
}

void ExpectSumOfSome(GpuRank* self, int32_t process_set, int rank, int size) {
  if (rank == 0) ExpectSum(self, process_set, 3, size == 2 ? 3 : 8);
  if (rank == 1 && size > 2) ExpectSum(self, process_set, 5, 8);
}

void ExpectSumOfAll(GpuRank* self, int rank, int size) {
  ExpectSum(self, 0, static_cast<float>(rank),
            static_cast<float>(size * (size - 1)) / 2);
}

void ExpectOneWarning(CapturedErrors* errors, const Failure& failure) {
  ASSERT_TRUE(errors->AwaitText(kThroughHost));
  const std::string text = errors->text();
  EXPECT_EQ(Count(text, kThroughHost), 1u) << text;
  EXPECT_EQ(Count(text, "\n"), 1u) << text;
  const std::string speaker =
      "rank " + (failure.speaker < 0 ? "" : std::to_string(failure.speaker));
  EXPECT_TRUE(Contains(text, "keras_hvd [" + speaker)) << text;
  EXPECT_TRUE(Contains(text, "warning: ")) << text;
  EXPECT_TRUE(Contains(text, "slow: " + speaker)) << text;
  EXPECT_TRUE(Contains(text, " (pid " + std::to_string(getpid()) + " on host0)"))
      << text;
  EXPECT_TRUE(Contains(text, "NCCL failed in " + failure.function + ": ")) << text;
}

// NCCL would otherwise find the first GPU current, and leave a context there.
void ExpectAbortsWithAContext(const StandIn& libraries) {
  for (const stand_in::Call& call : libraries->Calls()) {
    if (call.function != "ncclCommAbort") continue;
    EXPECT_TRUE(call.has_context) << call.thread << ": " << call.arguments;
  }
}

std::string Text(const Failure& failure) {
  const Injection& injection = failure.injection;
  return injection.function + " code " + std::to_string(injection.code) + " member " +
         std::to_string(injection.member) + (injection.asynchronous ? " later" : "") +
         (failure.in_the_midst ? " in the midst" : "");
}

// With the other numbers of ranks every code is tried somewhere.
std::vector<int32_t> Codes(int size) {
  if (size == 2) return {1, 2, 3, 4, 5, 6};
  return {size};
}

class GpuFallbackTest : public testing::TestWithParam<int> {};

// ---- The communicator of a set's first batch

void FailTheFirst(const StandIn& libraries, int size, const Failure& failure,
                  uint64_t seed) {
  SCOPED_TRACE(Text(failure));
  CapturedErrors errors;
  const std::vector<Plan> plans = GpuPlans(size, seed, 5);
  {
    GpuJob job(libraries, size, seed);
    {
      const Failing failing(libraries, failure, kInit, size);
      job.ForEach([&](GpuRank& self, int rank) { RunAll(&self, rank, plans); });
    }
    const int64_t splits = CountCalls(libraries, kSplit);
    job.ForEach([&](GpuRank& self, int rank) {
      int32_t id = -1;
      ASSERT_EQ(self.engine().AddProcessSet(SomeRanks(size), &id).message, "");
      ExpectSumOfSome(&self, id, rank, size);
      ExpectSumOfAll(&self, rank, size);
      ASSERT_EQ(self.engine().RemoveProcessSet(id).message, "");
    });
    // But to try the communicator out.
    EXPECT_LE(CountCalls(libraries, "ncclGroupStart"), size);
    EXPECT_EQ(CountCalls(libraries, kSplit), splits);
    EXPECT_LE(CountCalls(libraries, kInit), size);
    ExpectAbortsWithAContext(libraries);
  }
  ExpectOneWarning(&errors, failure);
}

TEST_P(GpuFallbackTest, AnInitThatFailsIsDoneWithout) {
  const int size = GetParam();
  const StandIn libraries;
  uint64_t seed = 1;
  for (const int32_t code : Codes(size)) {
    FailTheFirst(libraries, size, AtMember(-1, "ncclGetUniqueId", code, false), seed);
    for (const Failure& failure : Failures(kInit, size, code)) {
      FailTheFirst(libraries, size, failure, ++seed);
    }
    for (const Failure& failure : FailuresOfTheFirstUse(size, code)) {
      FailTheFirst(libraries, size, failure, ++seed);
    }
  }
}

// ---- A part of that of all ranks

void FailASplit(const StandIn& libraries, int size, const Failure& failure,
                uint64_t seed) {
  SCOPED_TRACE(Text(failure));
  CapturedErrors errors;
  const std::vector<Plan> plans = GpuPlans(size, seed, 3);
  {
    GpuJob job(libraries, size, seed);
    job.Connect();
    std::vector<int32_t> before(size), failed(size);
    job.ForEach([&](GpuRank& self, int rank) {
      const std::vector<int> ranks = {size - 2, size - 1};
      ASSERT_EQ(self.engine().AddProcessSet(ranks, &before[rank]).message, "");
      if (rank >= size - 2) ExpectSum(&self, before[rank], 3, 6);
    });
    // Each communicator's first one tries it out.
    EXPECT_EQ(CountCalls(libraries, "ncclAllReduce"), 2 * size + 2 * 2);
    {
      const Failing failing(libraries, failure, kSplit, size);
      job.ForEach([&](GpuRank& self, int rank) {
        const std::vector<int> ranks = SomeRanks(size);
        ASSERT_EQ(self.engine().AddProcessSet(ranks, &failed[rank]).message, "");
      });
    }
    const int64_t groups = CountCalls(libraries, "ncclGroupStart");
    job.ForEach([&](GpuRank& self, int rank) {
      ExpectSumOfSome(&self, failed[rank], rank, size);
      if (rank >= size - 2) ExpectSum(&self, before[rank], 3, 6);
      RunAll(&self, rank, plans);
      ASSERT_EQ(self.engine().RemoveProcessSet(failed[rank]).message, "");
      int32_t after = -1;
      ASSERT_EQ(self.engine().AddProcessSet(SomeRanks(size), &after).message, "");
      ExpectSumOfSome(&self, after, rank, size);
    });
    EXPECT_EQ(CountCalls(libraries, "ncclGroupStart"), groups);
    EXPECT_EQ(CountCalls(libraries, kInit), size);
    ExpectAbortsWithAContext(libraries);
  }
  ExpectOneWarning(&errors, failure);
}

class GpuSplitFallbackTest : public testing::TestWithParam<int> {};

TEST_P(GpuSplitFallbackTest, ASplitThatFailsIsDoneWithout) {
  const int size = GetParam();
  const StandIn libraries;
  uint64_t seed = 1;
  for (const int32_t code : Codes(size - 1)) {
    for (const Failure& failure : Failures(kSplit, size, code)) {
      FailASplit(libraries, size, failure, ++seed);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, GpuFallbackTest, testing::Range(2, 5));
// A part for one rank alone is not made.
INSTANTIATE_TEST_SUITE_P(Sizes, GpuSplitFallbackTest, testing::Range(3, 5));

// ---- Several sets

// Sets before the first communicator, which are no parts of one.
void AddSets(GpuJob* job, const std::vector<std::vector<int>>& sets) {
  job->ForEach([&](GpuRank& self, int) {
    for (size_t i = 0; i < sets.size(); ++i) {
      int32_t id = 0;
      ASSERT_EQ(self.engine().AddProcessSet(sets[i], &id).message, "");
      ASSERT_EQ(id, static_cast<int32_t>(i + 1));
    }
  });
}

TEST(GpuFallbackSetsTest, WhoHasSeenItFailTriesNoMore) {
  const StandIn libraries;
  for (const bool asynchronous : {false, true}) {
    CapturedErrors errors;
    const Failure failure = AtMember(1, kInit, 2, asynchronous);
    {
      GpuJob job(libraries, 3, 7);
      AddSets(&job, {{0, 1}, {1, 2}});
      libraries->Inject(failure.injection);
      job.ForEach([](GpuRank& self, int rank) {
        for (int step = 0; step < 5; ++step) {
          if (rank < 2) ExpectSum(&self, 1, static_cast<float>(rank), 1);
          if (rank > 0) ExpectSum(&self, 2, static_cast<float>(rank), 3);
          ExpectSumOfAll(&self, rank, 3);
        }
      });
      EXPECT_LE(CountCalls(libraries, kInit), 2);
      EXPECT_LE(CountCalls(libraries, "ncclAllReduce"), 1);
    }
    ExpectOneWarning(&errors, failure);
  }
}

TEST(GpuFallbackSetsTest, WhatHasACommunicatorKeepsIt) {
  const StandIn libraries;
  CapturedErrors errors;
  const Failure failure = AtMember(0, kInit, 3, true);
  {
    GpuJob job(libraries, 4, 8);
    AddSets(&job, {{0, 1}, {2, 3}});
    job.Connect();
    libraries->Inject(failure.injection);
    job.ForEach([](GpuRank& self, int rank) {
      if (rank < 2) ExpectSum(&self, 1, static_cast<float>(rank), 1);
    });
    const int64_t sums = CountCalls(libraries, "ncclAllReduce");
    EXPECT_LE(sums, 4 + 4 + 1);
    job.ForEach([](GpuRank& self, int rank) {
      if (rank >= 2) ExpectSum(&self, 2, static_cast<float>(rank), 5);
      ExpectSumOfAll(&self, rank, 4);
      int32_t id = 0;
      ASSERT_EQ(self.engine().AddProcessSet({1, 2}, &id).message, "");
      if (rank == 1 || rank == 2) ExpectSum(&self, id, static_cast<float>(rank), 3);
    });
    EXPECT_EQ(CountCalls(libraries, "ncclAllReduce"), sums + 2 * 2 + 4 + 2 * 2);
  }
  ExpectOneWarning(&errors, failure);
}

// Whatever the reasons, and whichever sets without each other's ranks have them.
TEST(GpuFallbackSetsTest, OneWarningIsForAllSets) {
  const StandIn libraries;
  SetLog(LogLevel::kInfo, false);
  CapturedErrors errors;
  {
    GpuJob job(libraries, 4, 9, [](EngineOptions* options, int rank) {
      if (rank % 2 == 1) options->gpu_libraries.nccl = "/no/libnccl.so.2";
    });
    AddSets(&job, {{0, 1}, {2, 3}});
    job.ForEach([](GpuRank& self, int rank) {
      ExpectSum(&self, rank < 2 ? 1 : 2, static_cast<float>(rank), rank < 2 ? 1 : 5);
      ExpectSumOfAll(&self, rank, 4);
    });
  }
  SetLog(LogLevel::kWarning, false);
  ASSERT_TRUE(errors.AwaitText("/no/libnccl.so.2"));
  const std::string text = errors.text();
  EXPECT_EQ(Count(text, "warning: collectives of tensors on GPUs go"), 1u) << text;
  EXPECT_EQ(Count(text, "info: collectives of tensors on GPUs go"), 1u) << text;
}

TEST(GpuFallbackSetsTest, RanksWithDifferentVersionsSayWhoHasWhich) {
  const StandIn libraries;
  // Ranks open it at once, under a lock that the thread sanitizer does not see: the
  // dynamic linker's.
  ASSERT_NE(dlopen(stand_in::kAnotherNcclLibrary, RTLD_NOW | RTLD_LOCAL), nullptr);
  CapturedErrors errors;
  {
    GpuJob job(libraries, 4, 10, [](EngineOptions* options, int rank) {
      if (rank >= 2) options->gpu_libraries.nccl = stand_in::kAnotherNcclLibrary;
    });
    job.ForEach([](GpuRank& self, int rank) {
      ExpectSumOfAll(&self, rank, 4);
      int32_t id = 0;
      ASSERT_EQ(self.engine().AddProcessSet({0, 1}, &id).message, "");
      if (rank < 2) ExpectSum(&self, id, static_cast<float>(rank), 1);
    });
    // The communicator of the set alone, whose members have the same.
    EXPECT_EQ(CountCalls(libraries, kInit), 2);
  }
  ASSERT_TRUE(errors.AwaitText(kThroughHost));
  const std::string text = errors.text();
  EXPECT_EQ(Count(text, "\n"), 1u) << text;
  EXPECT_TRUE(Contains(text, "keras_hvd [rank 2] warning: ")) << text;
  EXPECT_TRUE(Contains(text, "slow: this rank has NCCL 2.28.9 (")) << text;
  EXPECT_TRUE(Contains(text, "libnccl_another.so.2) and rank 0 (pid ")) << text;
  EXPECT_TRUE(Contains(text, " on host0) has 2.23.4; all need the same: ")) << text;
}

// ---- Waits

TEST(GpuFallbackWaitTest, ARankLeavesAnInitThatWouldNeverEnd) {
  const StandIn libraries;
  for (const bool asynchronous : {false, true}) {
    CapturedErrors errors;
    const Failure failure = AtMember(0, kInit, 2, asynchronous);
    {
      GpuJob job(libraries, 3, 1);
      for (const int member : {1, 2}) libraries->HoldProgress(member, true);
      libraries->Inject(failure.injection);
      job.ForEach([](GpuRank& self, int rank) { ExpectSumOfAll(&self, rank, 3); });
    }
    ExpectOneWarning(&errors, failure);
  }
}

TEST(GpuFallbackWaitTest, ARankThatHasJoinedGivesZerosThroughHostMemory) {
  const StandIn libraries;
  CapturedErrors errors;
  const Failure failure = AtMember(2, kInit, 5, false);
  {
    GpuJob job(libraries, 3, 1);
    libraries->Inject(failure.injection);
    job.ForEach([](GpuRank& self, int rank) {
      if (rank < 2) ExpectSum(&self, 0, static_cast<float>(rank + 1), 3);
      int32_t last = -1;
      EXPECT_EQ(self.engine().Join(&last).message, "");
    });
  }
  ExpectOneWarning(&errors, failure);
}

// Of a rank that has begun to make the communicator, or is about to.
TEST(GpuFallbackWaitTest, ADeathMeanwhileEndsTheJob) {
  const StandIn libraries;
  for (const bool splits : {false, true}) {
    const char* const function = splits ? kSplit : kInit;
    CapturedErrors errors;
    GpuJob job(libraries, 3, 1);
    if (splits) job.Connect();
    HoldAll(libraries, 3, true);
    const int64_t calls = CountCalls(libraries, function) + 3;
    Clock::time_point died;
    std::thread death([&] {
      EXPECT_TRUE(Eventually([&] { return CountCalls(libraries, function) == calls; }));
      died = Clock::now();
      job.state(0).Fail(Code::kRankFailed, "rank 2 died", 2);
    });
    job.ForEach([&](GpuRank& self, int) {
      int32_t id = 0;
      Buffer output;
      Status status;
      if (splits) status = self.engine().AddProcessSet({0, 1}, &id);
      if (status.ok()) status = self.Run(Sum("x", {1}), &output);
      EXPECT_EQ(status.code, Code::kRankFailed);
      EXPECT_TRUE(Contains(status.message, "rank 2 died")) << status.message;
    });
    death.join();
    EXPECT_LT(Clock::now() - died, std::chrono::seconds(2));
    EXPECT_FALSE(Contains(errors.text(), kThroughHost)) << errors.text();
    HoldAll(libraries, 3, false);
  }
}

// At any moment of it: an end of the job, or right results before that.
TEST(GpuFallbackWaitTest, ADeathWhileRanksAgreeEndsTheJob) {
  const StandIn libraries;
  for (uint64_t seed = 1; seed <= 15; ++seed) {
    CapturedErrors errors;
    GpuJob job(libraries, 3, seed);
    libraries->Inject(AtMember(static_cast<int>(seed % 3), kInit, 6, true).injection);
    std::thread death([&] {
      EXPECT_TRUE(Eventually([&] { return CountCalls(libraries, kInit) > 0; }));
      for (uint64_t i = 0; i < seed * 3; ++i) sched_yield();
      job.state(0).Fail(Code::kRankFailed, "rank 2 died", 2);
    });
    job.ForEach([](GpuRank& self, int) {
      Status status;
      Buffer output;
      for (float step = 1; status.ok(); ++step) {
        status = self.Run(Sum("x", {step}), &output);
        if (status.ok()) {
          EXPECT_EQ(FromBytes<float>(output), std::vector<float>{3 * step});
        }
      }
      EXPECT_TRUE(Contains(status.message, "rank 2 died")) << status.message;
    });
    death.join();
  }
}

}  // namespace
}  // namespace keras_hvd
