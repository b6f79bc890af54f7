// GPUs of several hosts: the same results as on one, and all hosts know of a failure
// before a communicator is aborted.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tf_ops/engine/gpu_plan_testing.h"
#include "tf_ops/engine/hosts_testing.h"
#include "tf_ops/transport/failure_wave.h"

namespace keras_hvd {
namespace {

using stand_in::StandIn;

class GpuHostsTest : public testing::TestWithParam<Layout> {
 protected:
  int size() const { return GetParam().size(); }
};

// ---- Results

std::vector<Plan> PlansOf(const std::vector<int>& members, int32_t process_set) {
  std::mt19937_64 random(members.size());
  std::vector<Plan> plans;
  while (plans.size() < 40) {
    Plan plan = PlanForHosts(static_cast<int>(plans.size()),
                             static_cast<int>(members.size()), &random);
    const Kind kind = plan.asks.front().description.kind;
    if (kind == Kind::kBarrier || IsRoundedByNccl(plan)) continue;
    plan.GiveTo(process_set, members);
    plans.push_back(std::move(plan));
  }
  return plans;
}

// All ranks, and of more than two then the first and the last one, of two hosts.
void RunPlans(GpuJob* job) {
  std::vector<int> all(job->size());
  std::iota(all.begin(), all.end(), 0);
  const std::vector<int> some = {0, all.back()};
  const std::vector<Plan> of_all = PlansOf(all, 0), of_some = PlansOf(some, 1);
  job->ForEach([&](GpuRank& self, int rank) {
    RunAll(&self, rank, of_all);
    if (some == all) return;
    int32_t id = 0;
    ASSERT_EQ(self.engine().AddProcessSet(some, &id).message, "");
    ASSERT_EQ(id, 1);
    const int index = of_some.front().PlaceOf(rank);
    if (index >= 0) RunAll(&self, index, of_some);
  });
}

TEST_P(GpuHostsTest, EachKindHasTheCpusResultsOnEachRank) {
  const StandIn libraries;
  for (const uint64_t seed : {1, 2, 3}) {
    GpuJob job(libraries, GetParam(), seed);
    RunPlans(&job);
    for (const char* const function :
         {"ncclAllReduce", "ncclBroadcast", "ncclReduce", "ncclSend"}) {
      EXPECT_GT(CountCalls(libraries, function), 0) << function;
    }
  }
}

TEST_P(GpuHostsTest, WhatOneOfThemCannotDoWithNcclGoesThroughHostMemoryOnAll) {
  const StandIn libraries;
  enum Way { kNoLibrary, kNoCommunicator, kNoCommunicatorLater };
  for (const Way way : {kNoLibrary, kNoCommunicator, kNoCommunicatorLater}) {
    for (const int without : {0, size() - 1}) {
      CapturedErrors errors;
      {
        GpuJob job(libraries, GetParam(), way + 1,
                   [&](EngineOptions* options, int rank) {
                     if (way != kNoLibrary || rank != without) return;
                     options->gpu_libraries.nccl = "/no/libnccl.so.2";
                   });
        if (way != kNoLibrary) {
          libraries->Inject(
              {"ncclCommInitRankConfig", 2, 1, way == kNoCommunicatorLater, without});
        }
        RunPlans(&job);
        // But to try the communicator out.
        EXPECT_LE(CountCalls(libraries, "ncclGroupStart"), size());
      }
      const std::string text = errors.text();
      EXPECT_EQ(Count(text, "go through host memory"), 1u) << text;
      EXPECT_TRUE(Contains(text, "keras_hvd [rank " + std::to_string(without) + "] "))
          << text;
    }
  }
}

// ---- Failures

bool KnowsOfFailure(GpuJob* job, int rank) {
  return job->state(rank).header().failure_code.load() != 0;
}

TEST_P(GpuHostsTest, NoStreamGoesOnBeforeAllHostsKnowOfTheFailure) {
  const StandIn libraries;
  for (int failing = 0; failing < size(); ++failing) {
    GpuJob job(libraries, GetParam(), failing + 1);
    job.Connect();
    // All others wait on their streams for this one.
    libraries->HoldCollectives((failing + 1) % size(), true);
    std::atomic<int> went_on{0}, before_all_knew{0};
    job.ForEach([&](GpuRank& self, int) {
      const size_t number = self.Submit(Sum("w", std::vector<float>(100, 1)));
      ASSERT_TRUE(self.End(number).ok());
      libraries->Enqueue(self.stream(), [&] {
        went_on += 1;
        for (int rank = 0; rank < size(); ++rank) {
          if (!KnowsOfFailure(&job, rank)) before_all_knew += 1;
        }
      });
    });
    const Clock::time_point failed = Clock::now();
    job.state(failing).Fail(Code::kRankFailed, "made to fail");
    job.ForEach([](GpuRank& self, int) { self.Synchronize(); });
    EXPECT_LT(Clock::now() - failed, std::chrono::seconds(2));
    EXPECT_EQ(went_on, size());
    EXPECT_EQ(before_all_knew, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, GpuHostsTest,
                         testing::Values(Layout{{0, 1}}, Layout{{0, 0, 1, 1}},
                                         Layout{{0, 1, 2, 3}, 1},
                                         Layout{{0, 1, 2}, 2}));

// Fails on the host of one rank while another one's engine does nothing, as that of a
// stopped process; each is alone on its host.
void FailBesideASilentHost(const StandIn& libraries, const Layout& layout, int silent) {
  const int size = layout.size(), failing = (silent + 1) % size;
  GpuJob job(libraries, layout, silent + 1);
  job.Connect();
  libraries->HoldCollectives(failing, true);
  std::promise<void> is_silent, speaks;
  std::vector<std::atomic<bool>> went_on(size);
  std::atomic<int> before_all_knew{0};
  job.ForEach([&](GpuRank& self, int rank) {
    Ask ask = Sum("w", std::vector<float>(100, 1));
    if (rank == silent) {
      ask.on_end = [&] {
        is_silent.set_value();
        speaks.get_future().wait();
      };
    }
    const size_t number = self.Submit(ask);
    if (rank == silent) {
      is_silent.get_future().wait();
    } else {
      ASSERT_TRUE(self.End(number).ok());
    }
    libraries->Enqueue(self.stream(), [&, rank] {
      went_on[rank] = true;
      for (int other = 0; other < size; ++other) {
        const bool can_know = other != silent || rank == silent;
        if (can_know && !KnowsOfFailure(&job, other)) before_all_knew += 1;
      }
    });
  });
  const Clock::time_point failed = Clock::now();
  job.state(failing).Fail(Code::kRankFailed, "made to fail");
  job.ForEach([&](GpuRank& self, int rank) {
    if (rank != silent) self.Synchronize();
  });
  // The silent one had time to answer: the least is that of a leader directly above.
  const Clock::duration waited = Clock::now() - failed;
  EXPECT_GE(waited, std::chrono::milliseconds(700));
  EXPECT_LT(waited, FailureWave::kPatience + std::chrono::seconds(1));
  // Its own communicator is its own affair.
  EXPECT_FALSE(went_on[silent]);
  std::vector<int64_t> aborts(size), expected(size, 1);
  expected[silent] = 0;
  for (const stand_in::Call& call : libraries->Calls()) {
    if (call.function == "ncclCommAbort") aborts[call.member] = 1;
  }
  EXPECT_EQ(aborts, expected);
  speaks.set_value();
  job[silent].Synchronize();
  EXPECT_TRUE(went_on[silent]);
  EXPECT_EQ(before_all_knew, 0);
}

TEST(GpuSilentHostTest, NoStreamGoesOnBeforeAllThatAnswerKnowOfTheFailure) {
  const StandIn libraries;
  for (const Layout& layout : {Layout{{0, 1, 2}, 1}, Layout{{0, 1, 2, 3}, 2}}) {
    for (int silent = 0; silent < layout.size(); ++silent) {
      FailBesideASilentHost(libraries, layout, silent);
    }
  }
}

}  // namespace
}  // namespace keras_hvd
