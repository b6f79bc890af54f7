// Process sets: their order, their independence, and who may use them.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tf_ops/engine/engine_testing.h"
#include "tf_ops/engine/random_plan_testing.h"
#include "tf_ops/engine/stall_watch.h"

namespace keras_hvd {
namespace {

TEST(ProcessSetTest, OverlappingOnesInAnotherOrderOnEachRank) {
  constexpr int kSize = 4;
  const std::vector<std::vector<int>> sets = {{0, 1}, {2, 3}, {1, 2}, {0, 2, 3}, {3}};
  std::mt19937_64 random(7);
  for (const bool spin : {false, true}) {
    EngineOptions options;
    options.cores = spin ? kSize : 1;
    options.check = spin;
    Job job(kSize, options);
    AddSets(&job, sets);
    std::vector<Plan> plans;
    for (int i = 0; i < 300; ++i) {
      const size_t set = random() % (sets.size() + 1);
      const std::vector<int> members =
          set == 0 ? std::vector<int>{0, 1, 2, 3} : sets[set - 1];
      plans.push_back(RandomPlan(i, static_cast<int>(members.size()), &random));
      plans.back().GiveTo(static_cast<int32_t>(set), members);
    }
    job.ForEach([&](Rank& self, int rank) { RunAll(&self, rank, plans); });
  }
}

// Rank 3 comes to its set's collective only when the other set has run a thousand.
TEST(ProcessSetTest, DisjointOnesDoNotWaitForEachOther) {
  for (const bool large : {false, true}) {
    Job job(4);
    AddSets(&job, {{0, 1}, {2, 3}});
    const std::vector<float> values = large ? kManyValues : std::vector<float>{1};
    std::atomic<int> ended{0};
    job.ForEach([&](Rank& self, int rank) {
      if (rank == 3) {
        EXPECT_TRUE(Eventually([&] { return ended.load() == 2; }));
      }
      const int32_t set = rank < 2 ? 1 : 2;
      const int times = rank >= 2 ? 1 : large ? 100 : 1000;
      for (int i = 0; i < times; ++i) {
        ASSERT_TRUE(self.Run(In(set, Sum("x", values))).ok());
      }
      ended += 1;
    });
  }
}

// The same while rank 2 is in the middle of its collective, and for sets that rank 0,
// which decides, is not in.
TEST(ProcessSetTest, OneThatIsHeldUpInTheMiddleHoldsUpNoOther) {
  Job job(5);
  AddSets(&job, {{1, 2}, {3, 4}});
  std::atomic<bool> held{false}, done{false};
  job.ForEach([&](Rank& self, int rank) {
    if (rank == 0) return;
    if (rank < 3) {
      Ask ask = In(1, Gather("x", kManyRows));
      ask.on_allocate = [&] {
        held = true;
        EXPECT_TRUE(Eventually([&] { return done.load(); }));
      };
      EXPECT_TRUE(self.Run(ask).ok());
      return;
    }
    EXPECT_TRUE(Eventually([&] { return held.load(); }));
    for (int i = 0; i < 300; ++i) {
      ASSERT_TRUE(self.Run(In(2, Sum("x", {1}))).ok());
    }
    done = true;
  });
  EXPECT_EQ(job[0].counters().lost_wakes, 0);
}

// Rank 0 adds it while its engine's thread sleeps, which so far need not hear the
// others' submissions. It has nothing to do afterwards. Returns how long these take.
Clock::duration ReduceWithoutAnIdleRank0() {
  Job job(3);
  EXPECT_TRUE(job[0].AwaitRest());
  std::vector<std::thread> add;
  for (const int rank : {1, 2}) {
    const int64_t sleeps = job[rank].counters().sleeps;
    add.emplace_back([&, rank] {
      int32_t id = 0;
      EXPECT_EQ(job[rank].engine().AddProcessSet({1, 2}, &id).message, "");
    });
    EXPECT_TRUE(Eventually([&] { return job[rank].counters().sleeps > sleeps; }));
  }
  int32_t id = 0;
  EXPECT_EQ(job[0].engine().AddProcessSet({1, 2}, &id).message, "");
  for (std::thread& thread : add) thread.join();
  const Clock::time_point begin = Clock::now();
  const size_t numbers[] = {job[1].Submit(In(id, Sum("x", {1}))),
                            job[2].Submit(In(id, Sum("x", {1})))};
  EXPECT_EQ(job[1].End(numbers[0]).message, "");
  EXPECT_EQ(job[2].End(numbers[1]).message, "");
  return Clock::now() - begin;
}

TEST(ProcessSetTest, OneWithoutAnIdleRank0NeedsNothingOfIt) {
  // Not when the waiting rank looks for stalls, and rings. A busy machine may delay
  // one.
  Clock::duration least = Clock::duration::max();
  for (int i = 0; i < 3 && least >= StallWatch::kInterval / 2; ++i) {
    least = std::min(least, ReduceWithoutAnIdleRank0());
  }
  EXPECT_LT(least, StallWatch::kInterval / 2);
}

TEST(ProcessSetTest, ARankOutsideOfItFailsAtOnceAndHoldsUpNobody) {
  Job job(3);
  AddSets(&job, {{0, 2}});
  const Status outside = job[1].Run(In(1, Sum("x", {1})));
  EXPECT_EQ(outside.code, Code::kInvalidArgument);
  EXPECT_EQ(outside.message,
            "allreduce 'x' failed: rank 1 is not in process set 1 (ranks 0, 2)");
  const Status unknown = job[1].Run(In(9, Sum("x", {1})));
  EXPECT_EQ(unknown.message,
            "allreduce 'x' failed on rank 1: there is no process set 9: it was not "
            "added, or has been removed");
  Ask broadcast = In(1, Sum("b", {1}));
  broadcast.description.kind = Kind::kBroadcast;
  broadcast.description.root = 1;
  EXPECT_EQ(job[0].Run(broadcast).message,
            "broadcast 'b' failed on rank 0: root_rank 1 is not in process set 1 "
            "(ranks 0, 2)");
  job.ForEach([&](Rank& self, int rank) {
    if (rank != 1) {
      EXPECT_TRUE(self.Run(In(1, Sum("x", {1}))).ok());
    }
    EXPECT_TRUE(self.Run(Sum("x", {1})).ok());
  });
}

TEST(ProcessSetTest, MembersThatDisagreeAreNamedByTheirRanksInTheJob) {
  Job job(4);
  AddSets(&job, {{1, 3}});
  job.ForEach([&](Rank& self, int rank) {
    if (rank % 2 == 0) return;
    const std::vector<float> values(rank);
    const Status status = self.Run(In(1, Sum("x", values)));
    EXPECT_EQ(status.code, Code::kMismatch);
    EXPECT_TRUE(Contains(status.message,
                         "rank 1: allreduce Sum of float32[1]; rank 3: "
                         "allreduce Sum of float32[3]"))
        << status.message;
  });
}

TEST(ProcessSetTest, IsRemovedByAll) {
  Job job(3);
  for (int32_t round = 1; round < 4; ++round) {
    job.ForEach([&](Rank& self, int rank) {
      int32_t id = 0;
      EXPECT_TRUE(self.engine().AddProcessSet({1, 2}, &id).ok());
      EXPECT_EQ(id, round);
      std::vector<int> members;
      EXPECT_TRUE(self.engine().MembersOf(id, &members).ok());
      EXPECT_EQ(members, (std::vector<int>{1, 2}));
      if (rank > 0) {
        EXPECT_TRUE(self.Run(In(id, Sum("x", {1}))).ok());
      }
      EXPECT_EQ(self.engine().RemoveProcessSet(id).message, "");
      EXPECT_EQ(self.engine().MembersOf(id, &members).code, Code::kInvalidArgument);
      EXPECT_EQ(self.Run(In(id, Sum("x", {1}))).code, Code::kInvalidArgument);
      EXPECT_EQ(self.engine().RemoveProcessSet(id).code, Code::kInvalidArgument);
      EXPECT_EQ(self.engine().RemoveProcessSet(0).code, Code::kInvalidArgument);
    });
  }
}

TEST(ProcessSetTest, RanksThatAddDifferentOnesHearWhatEachGave) {
  Job job(2);
  job.ForEach([&](Rank& self, int rank) {
    int32_t id = 0;
    const Status status = self.engine().AddProcessSet({rank}, &id);
    EXPECT_EQ(status.code, Code::kMismatch);
    EXPECT_EQ(status.message,
              "add_process_set() failed on rank " + std::to_string(rank) +
                  ": the ranks' calls differ (rank 0: add_process_set of rank 0; rank "
                  "1: add_process_set of rank 1). Every rank must add and remove the "
                  "same process sets in the same order");
    for (const std::vector<int>& wrong :
         std::vector<std::vector<int>>{{}, {0, 0}, {1, 0}, {2}, {-1}}) {
      EXPECT_EQ(self.engine().AddProcessSet(wrong, &id).code, Code::kInvalidArgument);
    }
    EXPECT_TRUE(self.engine().AddProcessSet({1}, &id).ok());
    EXPECT_EQ(id, 1);
  });
}

TEST(ProcessSetTest, GoesOnWhenARankOutsideOfItLeaves) {
  Job job(3);
  AddSets(&job, {{0, 2}, {1, 2}});
  job[1].Leave();
  job.ForEach([&](Rank& self, int rank) {
    if (rank == 1) return;
    EXPECT_TRUE(self.Run(In(1, Sum("x", {1}))).ok());
    EXPECT_EQ(self.Run(Sum("x", {1})).code, Code::kRankFailed);
    int32_t id = 0;
    EXPECT_EQ(self.engine().AddProcessSet({0}, &id).code, Code::kRankFailed);
  });
  EXPECT_EQ(job[2].Run(In(2, Sum("x", {1}))).code, Code::kRankFailed);
}

TEST(ProcessSetTest, AStallNamesItsMembersOnly) {
  EngineOptions options;
  options.stall_warning_seconds = 0.01;
  Job job(4, options);
  AddSets(&job, {{1, 3}});
  CapturedErrors errors;
  job[3].Submit(In(1, Sum("x", {1})));
  ASSERT_TRUE(errors.AwaitText("which not every rank of process set 1 has reached"));
  EXPECT_TRUE(job[1].Run(In(1, Sum("x", {1}))).ok());
  job[3].EndAll();
  const std::string text = errors.text();
  EXPECT_TRUE(Contains(text, "rank 3 waited ")) << text;
  EXPECT_TRUE(Contains(text, "\n  rank 1 (pid ")) << text;
  EXPECT_FALSE(Contains(text, "\n  rank 0 (pid ")) << text;
  EXPECT_FALSE(Contains(text, "\n  rank 2 (pid ")) << text;
}

}  // namespace
}  // namespace keras_hvd
