// The engine with tensors on GPUs where a rank leaves: nobody waits on its GPU for work
// that this rank never enqueues.
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tf_ops/engine/engine_gpu_testing.h"

namespace keras_hvd {
namespace {

using stand_in::StandIn;

// The other would wait for it on its GPU for ever.
TEST(GpuLeavingTest, ARankThatLeavesBeforeItsGpuIsDoneEndsTheJob) {
  const StandIn libraries;
  for (const Layout& layout : {Layout{{0, 0}}, Layout{{0, 1}}}) {
    GpuJob job(libraries, layout, 1);
    job.Connect();
    libraries->HoldCollectives(1, true);
    job.ForEach([&](GpuRank& self, int) {
      ASSERT_TRUE(self.End(self.Submit(Sum("held", {1}))).ok());
    });
    job.Stop(1);
    job[0].Synchronize();
    EXPECT_TRUE(job.state().Failed());
    const Status status = job[0].End(job[0].Submit(Sum("later", {1})));
    EXPECT_TRUE(Contains(status.message, "left the job in the middle of"))
        << status.message;
    EXPECT_TRUE(Contains(status.message, "'held'")) << status.message;
    libraries->HoldCollectives(1, false);
  }
}

int64_t Polls(const StandIn& libraries, int rank) {
  int64_t polls = 0;
  for (const stand_in::Call& call : libraries->Calls()) {
    if (call.rank == rank && call.function == "cuEventQuery") polls += call.times;
  }
  return polls;
}

// Expects the job to fail because a rank has left without running its last request.
void ExpectFailure(GpuRank* other, int leaver) {
  const Status status = other->End(other->Submit(Sum("later", {1})));
  EXPECT_EQ(status.code, Code::kRankFailed);
  EXPECT_TRUE(Contains(status.message, "rank " + std::to_string(leaver)))
      << status.message;
  EXPECT_TRUE(Contains(status.message, "left the job ")) << status.message;
  EXPECT_TRUE(Contains(status.message, "allreduce 'last'")) << status.message;
}

// Its request is decided while it waits for its GPU, on its way out; or, which is as
// good, before that.
void LeaveWithoutRunningWhatWasDecided(int leaver, const Layout& layout) {
  const StandIn libraries;
  GpuJob job(libraries, layout, 1);
  job.Connect();
  libraries->HoldCollectives(1 - leaver, true);
  job.ForEach([](GpuRank& self, int) {
    ASSERT_TRUE(self.End(self.Submit(Sum("held", {1}))).ok());
  });
  const size_t last = job[leaver].Submit(Sum("last", {1}));
  const int64_t polls = Polls(libraries, leaver);
  std::thread leaves([&] { job.Stop(leaver); });
  // It does nothing else any more.
  EXPECT_TRUE(Eventually([&] { return Polls(libraries, leaver) > polls + 100; }));
  GpuRank& other = job[1 - leaver];
  const size_t number = other.Submit(Sum("last", {1}));
  const Status enqueued = other.End(number);
  libraries->HoldCollectives(1 - leaver, false);
  leaves.join();
  EXPECT_EQ(job[leaver].End(last).code, Code::kShutDown);
  other.Synchronize();
  EXPECT_TRUE(enqueued.ok()) << enqueued.message;
  ExpectFailure(&other, leaver);
}

TEST(GpuLeavingTest, ARankThatDoesNotRunWhatWasDecidedEndsTheJob) {
  LeaveWithoutRunningWhatWasDecided(1, Layout{{0, 0}});
}

TEST(GpuLeavingTest, ARankThatDoesNotRunWhatWasDecidedEndsTheJobOnOtherHosts) {
  LeaveWithoutRunningWhatWasDecided(1, Layout{{0, 1}});
  LeaveWithoutRunningWhatWasDecided(0, Layout{{0, 1}});
}

// Rank 0 hears of the request and of the departure at once.
TEST(GpuLeavingTest, ARankThatLeavesBeforeItsRequestIsDecidedEndsTheJob) {
  const StandIn libraries;
  GpuJob job(libraries, Layout{{0, 1}}, 1);
  job.Connect();
  const size_t last = job[0].Submit(Sum("last", {1}));
  std::promise<void> is_busy, goes_on;
  Ask busy = Sum("busy", {1});
  const size_t of_other = job[1].Submit(busy);
  busy.on_end = [&] {
    is_busy.set_value();
    goes_on.get_future().wait();
  };
  job[0].Submit(busy);
  is_busy.get_future().wait();
  ASSERT_TRUE(job[1].End(of_other).ok());
  const size_t of_leaver = job[1].Submit(Sum("last", {1}));
  job.Stop(1);
  EXPECT_EQ(job[1].End(of_leaver).code, Code::kShutDown);
  goes_on.set_value();
  EXPECT_EQ(job[0].End(last).code, Code::kRankFailed);
  job[0].Synchronize();
  ExpectFailure(&job[0], 1);
}

// A rank's request for a process set, before which it leaves.
std::unique_ptr<Operation> CutShort(Kind kind, const std::vector<int>& members) {
  auto operation = std::make_unique<Operation>();
  Description description;
  description.kind = kind;
  description.name = "keras_hvd.process_sets";
  description.members = members;
  operation->description = std::make_shared<Description>(description);
  operation->done = [](const Status& status) {
    EXPECT_EQ(status.code, Code::kShutDown);
  };
  return operation;
}

// A new process set is a part of the communicator of all ranks, which all have to make.
TEST(GpuLeavingTest, ARankThatDoesNotAddAProcessSetEndsTheJobOnOtherHosts) {
  const StandIn libraries;
  GpuJob job(libraries, Layout{{0, 1, 2}}, 1);
  job.Connect();
  libraries->Hold(job[1].stream(), true);
  job.ForEach([](GpuRank& self, int) {
    ASSERT_TRUE(self.End(self.Submit(Sum("held", {1}))).ok());
  });
  const std::vector<int> members = {0, 2};
  ASSERT_TRUE(job[1].engine().Submit(CutShort(Kind::kAddProcessSet, members)).ok());
  const int64_t polls = Polls(libraries, 1);
  std::thread leaves([&] { job.Stop(1); });
  EXPECT_TRUE(Eventually([&] { return Polls(libraries, 1) > polls + 100; }));
  const int64_t of_other = Polls(libraries, 0);
  std::vector<std::thread> add;
  for (const int rank : members) {
    add.emplace_back([&, rank] {
      libraries->SetRank(rank);
      int32_t id = 0;
      const Status status = job[rank].engine().AddProcessSet(members, &id);
      EXPECT_EQ(status.code, Code::kRankFailed);
      EXPECT_TRUE(
          Contains(status.message, "has left the job before it ran add_process_set()"))
          << status.message;
    });
  }
  // It waits for its GPU before it makes its part.
  EXPECT_TRUE(Eventually([&] { return Polls(libraries, 0) > of_other + 100; }));
  libraries->Hold(job[1].stream(), false);
  leaves.join();
  for (std::thread& each : add) each.join();
}

// A set's last run is known after its end, too.
TEST(GpuLeavingTest, ARankThatRunsNothingBeforeItsProcessSetEndsEndsTheJob) {
  const StandIn libraries;
  GpuJob job(libraries, Layout{{0, 1, 2}}, 1);
  job.Connect();
  job.ForEach([](GpuRank& self, int) {
    int32_t id = 0;
    ASSERT_EQ(self.engine().AddProcessSet({0, 1}, &id).message, "");
    ASSERT_EQ(id, 1);
  });
  libraries->Hold(job[1].stream(), true);
  job.ForEach([](GpuRank& self, int) {
    ASSERT_TRUE(self.End(self.Submit(Sum("held", {1}))).ok());
  });
  Ask last = Sum("last", {1});
  last.description.process_set = 1;
  const size_t of_leaver = job[1].Submit(last);
  auto removal = CutShort(Kind::kRemoveProcessSet, {0, 1});
  ASSERT_TRUE(job[1].engine().Submit(std::move(removal)).ok());
  const int64_t polls = Polls(libraries, 1);
  std::thread leaves([&] { job.Stop(1); });
  EXPECT_TRUE(Eventually([&] { return Polls(libraries, 1) > polls + 100; }));
  const Status enqueued = job[0].End(job[0].Submit(last));
  EXPECT_TRUE(enqueued.ok()) << enqueued.message;
  std::vector<std::thread> remove;
  for (const int rank : {0, 2}) {
    remove.emplace_back([&, rank] {
      libraries->SetRank(rank);
      const Status end = job[rank].engine().RemoveProcessSet(1);
      // Rank 2 may be done before the job fails.
      if (rank == 0) {
        EXPECT_EQ(end.code, Code::kRankFailed) << end.message;
      }
    });
  }
  // Rank 0 has come to the end of the set.
  EXPECT_TRUE(
      Eventually([&] { return CountCalls(libraries, "ncclCommFinalize") > 0; }));
  libraries->Hold(job[1].stream(), false);
  leaves.join();
  for (std::thread& thread : remove) thread.join();
  EXPECT_EQ(job[1].End(of_leaver).code, Code::kShutDown);
  job[0].Synchronize();
  ExpectFailure(&job[0], 1);
}

// ---- Leaders that leave first

// One rank leads the host of another one, or a host above that. The rank that waits is
// on a third host, or on that of the leader.
struct Led {
  Layout layout;
  int leader, leaver, waiter;
};

void PrintTo(const Led& led, std::ostream* to) {
  PrintTo(led.layout, to);
  *to << ", leader " << led.leader << ", leaver " << led.leaver;
}

class GpuLeaderLeavingTest : public testing::TestWithParam<Led> {
 protected:
  // `abort`: after how many seconds of a stall the leader ends the job; 0: never.
  explicit GpuLeaderLeavingTest(double abort = 0)
      : job_(libraries_, GetParam().layout, 1, [&](EngineOptions* options, int rank) {
          if (rank == led_.leader) options->stall_abort_seconds = abort;
        }) {
    job_.Connect();
    without_leader_ = AddProcessSet(led_.leaver, led_.waiter);
    with_leader_ = AddProcessSet(led_.leader, led_.waiter);
  }

  int32_t AddProcessSet(int one, int other) {
    int32_t id = 0;
    job_.ForEach([&](GpuRank& self, int rank) {
      int32_t added = 0;
      const std::vector<int> members = {std::min(one, other), std::max(one, other)};
      ASSERT_EQ(self.engine().AddProcessSet(members, &added).message, "");
      if (rank == 0) id = added;
    });
    return id;
  }

  // Enqueues it on both, but a rank's GPU does not come to it.
  void Hold(int rank, const Ask& ask) {
    libraries_->Hold(job_[rank].stream(), true);
    const size_t number = job_[rank].Submit(ask);
    GpuRank& waiter = job_[led_.waiter];
    ASSERT_TRUE(waiter.End(waiter.Submit(ask)).ok());
    ASSERT_TRUE(job_[rank].End(number).ok());
  }

  // A rank that waits for its GPU on its way out, and does nothing else any more.
  std::thread BeginToLeave(int rank) {
    const int64_t polls = Polls(libraries_, rank);
    std::thread leaves([this, rank] { job_.Stop(rank); });
    EXPECT_TRUE(Eventually([&] { return Polls(libraries_, rank) > polls + 100; }));
    return leaves;
  }

  // The communicators of one process set and of all ranks, and their controls, are the
  // last that it gives back before it tells that it leaves.
  void AwaitEndOfGpu(int leader) {
    EXPECT_TRUE(Eventually([&] {
      int64_t ended = 0;
      for (const stand_in::Call& call : libraries_->Calls()) {
        const bool is_end = call.function == "ncclCommDestroy" && call.rank == leader;
        if (is_end) ended += call.times;
      }
      return ended == 3;
    }));
  }

  // The leaver has asked for it, and does not run it: it is on its way out.
  void Decide(const Ask& ask) {
    GpuRank& waiter = job_[led_.waiter];
    const Status enqueued = waiter.End(waiter.Submit(ask));
    EXPECT_TRUE(enqueued.ok()) << enqueued.message;
  }

  void ExpectFailureOfWaiter() {
    job_[led_.waiter].Synchronize();
    ExpectFailure(&job_[led_.waiter], led_.leaver);
  }

  static Ask In(int32_t process_set, Ask ask) {
    ask.description.process_set = process_set;
    return ask;
  }

  const Led led_ = GetParam();
  const StandIn libraries_;
  GpuJob job_;
  int32_t without_leader_ = 0, with_leader_ = 0;
};

// The request that the other one does not run was decided before the leader leaves.
TEST_P(GpuLeaderLeavingTest, OneBelowThatDoesNotRunWhatWasDecidedEndsTheJob) {
  Hold(led_.leaver, In(without_leader_, Sum("held", {1})));
  const Ask last = In(without_leader_, Sum("last", {1}));
  const size_t of_leaver = job_[led_.leaver].Submit(last);
  std::thread leaves = BeginToLeave(led_.leaver);
  Decide(last);
  std::thread leader_leaves([&] { job_.Stop(led_.leader); });
  AwaitEndOfGpu(led_.leader);
  libraries_->Hold(job_[led_.leaver].stream(), false);
  leader_leaves.join();
  leaves.join();
  EXPECT_EQ(job_[led_.leaver].End(of_leaver).code, Code::kShutDown);
  ExpectFailureOfWaiter();
}

// It is decided while the leader itself waits for its GPU.
TEST_P(GpuLeaderLeavingTest, WhatIsDecidedWhileALeaderLeavesIsNotMissed) {
  Hold(led_.leader, In(with_leader_, Sum("of leader", {1})));
  Hold(led_.leaver, In(without_leader_, Sum("held", {1})));
  const Ask last = In(without_leader_, Sum("last", {1}));
  job_[led_.leaver].Submit(last);
  std::thread leader_leaves = BeginToLeave(led_.leader);
  std::thread leaves = BeginToLeave(led_.leaver);
  Decide(last);
  libraries_->Hold(job_[led_.leader].stream(), false);
  AwaitEndOfGpu(led_.leader);
  libraries_->Hold(job_[led_.leaver].stream(), false);
  leader_leaves.join();
  leaves.join();
  ExpectFailureOfWaiter();
}

// Ranks that have run all decisions keep no leader.
TEST_P(GpuLeaderLeavingTest, ALeaderDoesNotWaitForOnesThatGoOn) {
  Buffer output;
  const Ask sum = In(without_leader_, Sum("w", {1}));
  std::thread other([&] { EXPECT_TRUE(job_[led_.leaver].Run(sum, &output).ok()); });
  Buffer of_waiter;
  EXPECT_TRUE(job_[led_.waiter].Run(sum, &of_waiter).ok());
  other.join();
  const Clock::time_point since = Clock::now();
  job_.Stop(led_.leader);
  EXPECT_LT(Clock::now() - since, std::chrono::seconds(2));
  job_.Stop(led_.leaver);
  EXPECT_FALSE(job_.state(led_.leaver).Failed());
  EXPECT_FALSE(job_.state(led_.waiter).Failed());
}

// Others wait in a collective for the leader, which does not take part any more. It
// does not wait for them.
TEST_P(GpuLeaderLeavingTest, OnesThatWaitForALeaderDoNotKeepIt) {
  // The links of its process would end, which others notice. Its world stays here.
  if (!led_.layout.Of(led_.leader).is_local(led_.leaver)) return;
  Hold(led_.leader, In(with_leader_, Sum("of leader", {1})));
  const int64_t batches = job_[led_.leaver].engine().counters().batches;
  const Ask in_memory = Sum("in memory", std::vector<float>(20'000, 1));
  job_[led_.leader].on_cpu().Submit(in_memory);
  std::thread leader_leaves = BeginToLeave(led_.leader);
  std::thread others([&] {
    job_.ForEach([&](GpuRank& self, int rank) {
      if (rank == led_.leader) return;
      Buffer output;
      const Status status = self.RunOnCpu(in_memory, &output);
      EXPECT_EQ(status.code, Code::kRankFailed);
      EXPECT_TRUE(Contains(status.message, "rank " + std::to_string(led_.leader)))
          << status.message;
    });
  });
  // It has begun there.
  const EngineCounters& counters = job_[led_.leaver].engine().counters();
  EXPECT_TRUE(Eventually([&] { return counters.batches > batches; }));
  libraries_->Hold(job_[led_.leader].stream(), false);
  leader_leaves.join();
  others.join();
}

class ImpatientGpuLeaderLeavingTest : public GpuLeaderLeavingTest {
 protected:
  ImpatientGpuLeaderLeavingTest() : GpuLeaderLeavingTest(1) {}
};

// It stays for as long as it would wait elsewhere, and says for whom.
TEST_P(ImpatientGpuLeaderLeavingTest, OneThatDoesNotGoOnKeepsItNoLonger) {
  Hold(led_.leaver, In(without_leader_, Sum("held", {1})));
  const Ask last = In(without_leader_, Sum("last", {1}));
  job_[led_.leaver].Submit(last);
  std::thread leaves = BeginToLeave(led_.leaver);
  Decide(last);
  job_.Stop(led_.leader);
  const Topology topology = led_.layout.Of(led_.leader);
  std::string rank = std::to_string(led_.leaver);
  for (int child : topology.children()) {
    const std::vector<int> below = topology.ranks_below(child);
    const bool leads = std::count(below.begin(), below.end(), led_.leaver) > 0;
    if (leads) rank = std::to_string(topology.leader_of(child));
  }
  const std::string reason = job_.state(led_.waiter).Failure().message;
  EXPECT_EQ(reason.rfind("rank " + rank + " (pid ", 0), 0u) << reason;
  EXPECT_TRUE(Contains(reason, "has not started for 1 s what was decided")) << reason;
  EXPECT_TRUE(Contains(reason, "KERAS_HVD_STALL_ABORT_SECONDS")) << reason;
  libraries_->Hold(job_[led_.leaver].stream(), false);
  leaves.join();
}

const auto kLed = testing::Values(
    Led{Layout{{0, 1, 1}}, 1, 2, 0}, Led{Layout{{0, 1, 2}, 1}, 1, 2, 0},
    Led{Layout{{0, 0, 1}}, 0, 1, 2}, Led{Layout{{0, 1, 2}}, 0, 2, 1},
    Led{Layout{{0, 1, 1, 2}}, 1, 2, 3}, Led{Layout{{0, 1, 2, 3}, 1}, 0, 3, 1});
INSTANTIATE_TEST_SUITE_P(Layouts, GpuLeaderLeavingTest, kLed);
// Without its leader the rank that waits hears nothing of rank 0.
INSTANTIATE_TEST_SUITE_P(CutOff, GpuLeaderLeavingTest,
                         testing::Values(Led{Layout{{0, 1, 1}}, 1, 0, 2},
                                         Led{Layout{{0, 1, 2}, 1}, 1, 0, 2}));
INSTANTIATE_TEST_SUITE_P(Layouts, ImpatientGpuLeaderLeavingTest, kLed);

}  // namespace
}  // namespace keras_hvd
