// Engines on several hosts: the tree of leaders, and ranks that leave, join or die.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <future>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tf_ops/engine/engine_testing.h"
#include "tf_ops/engine/hosts_testing.h"
#include "tf_ops/engine/random_plan_testing.h"
#include "tf_ops/engine/stall_watch.h"
#include "tf_ops/engine/timeline_testing.h"
#include "tf_ops/testing/child.h"

namespace keras_hvd {
namespace {

// The ranks of a job on several hosts, as threads of this process.
class HostsJob {
 public:
  explicit HostsJob(const Layout& layout, const EngineOptions& options = {},
                    int64_t exchange_bytes = kTinyExchange)
      : hosts_(layout, exchange_bytes) {
    for (int rank = 0; rank < layout.size(); ++rank) {
      ranks_.push_back(std::make_unique<Rank>(options, hosts_.WorldOf(rank)));
    }
  }

  Rank& operator[](int rank) { return *ranks_[rank]; }
  int size() const { return static_cast<int>(ranks_.size()); }
  JobState StateOf(int rank) { return hosts_.StateOf(rank); }

  // Runs `body(rank)` for all ranks at once. They leave together.
  template <typename Body>
  void ForEach(const Body& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) {
      threads.emplace_back([&, rank] { body(*ranks_[rank], rank); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  // All have come to a barrier, and each out of it, before any goes on: a rank that
  // leaves ends the job once one needs it, also for ranks that are still in the
  // barrier.
  void MeetAll() {
    ForEach([](Rank& self, int) {
      EXPECT_EQ(self.Run(Meet("all are there")).message, "");
    });
  }
  void LeaveAll() {
    ForEach([](Rank& self, int) { self.Leave(); });
  }

 private:
  Hosts hosts_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

class HostsTest : public testing::TestWithParam<Layout> {
 protected:
  int size() const { return GetParam().size(); }
};

TEST_P(HostsTest, RandomCollectivesInAnotherOrderOnEachRank) {
  constexpr int kRequests = 300;
  for (const bool spin : {false, true}) {
    EngineOptions options;
    options.cores = spin ? size() : 1;
    options.check = spin;
    std::mt19937_64 random(size());
    std::vector<Plan> plans;
    for (int i = 0; i < kRequests; ++i) {
      plans.push_back(PlanForHosts(i, size(), &random));
    }
    HostsJob job(GetParam(), options);
    job.ForEach([&](Rank& self, int rank) { RunAll(&self, rank, plans); });
    job.LeaveAll();
  }
}

TEST_P(HostsTest, ProcessSetsOverAnyRanks) {
  std::vector<std::vector<int>> sets = {{size() - 1}, {0}};
  if (size() > 2) {
    sets.push_back({0, size() - 1});
    sets.push_back({});
    for (int rank = 1; rank < size(); ++rank) sets.back().push_back(rank);
  }
  std::mt19937_64 random(3);
  std::vector<Plan> plans;
  for (int i = 0; i < 200; ++i) {
    const size_t set = random() % sets.size();
    const int count = static_cast<int>(sets[set].size());
    plans.push_back(PlanForHosts(i, count, &random));
    plans.back().GiveTo(static_cast<int32_t>(set + 1), sets[set]);
  }
  HostsJob job(GetParam());
  job.ForEach([&](Rank& self, int rank) {
    for (const std::vector<int>& set : sets) {
      int32_t id = 0;
      ASSERT_EQ(self.engine().AddProcessSet(set, &id).message, "");
    }
    RunAll(&self, rank, plans);
    ASSERT_EQ(self.engine().RemoveProcessSet(1).message, "");
  });
  job.LeaveAll();
}

TEST_P(HostsTest, WhatRanksDisagreeAboutIsAnErrorOnAll) {
  HostsJob job(GetParam());
  job.ForEach([&](Rank& self, int rank) {
    const Status end = self.Run(Sum("differs", std::vector<float>(1 + rank)));
    EXPECT_EQ(end.code, Code::kMismatch);
    EXPECT_TRUE(Contains(end.message, "'differs' differs between ranks"))
        << end.message;
    EXPECT_EQ(self.Run(Meet("after it")).message, "");
  });
  job.LeaveAll();
}

TEST_P(HostsTest, JoinedRanksGiveZeros) {
  HostsJob job(GetParam());
  job.ForEach([&](Rank& self, int rank) {
    for (int epoch = 0; epoch < 2; ++epoch) {
      const auto steps_of = [&](int r) { return 3 + 4 * ((r + epoch) % size()); };
      for (int step = 0; step < steps_of(rank); ++step) {
        const std::vector<float> values(step % 2 == 0 ? 5000 : 3, rank + 1);
        const size_t number = self.Submit(Sum("step " + std::to_string(step), values));
        ASSERT_EQ(self.End(number).message, "");
        float sum = 0;
        for (int r = 0; r < size(); ++r) sum += steps_of(r) > step ? r + 1 : 0;
        EXPECT_EQ(FromBytes<float>(self.Output(number)),
                  std::vector<float>(values.size(), sum));
      }
      int32_t last = -1;
      EXPECT_EQ(self.engine().Join(&last).message, "");
      EXPECT_EQ(last, (2 * size() - 1 - epoch) % size());
      EXPECT_EQ(self.Run(Meet("epoch")).message, "");
    }
  });
  job.LeaveAll();
}

TEST_P(HostsTest, WhoLeavesIsNamedToThoseWhoNeedIt) {
  const int leaver = size() - 1;
  HostsJob job(GetParam());
  job.MeetAll();
  job.ForEach([&](Rank& self, int rank) {
    if (rank == leaver) return self.Leave();
    const Status end = self.Run(Meet("without the last"));
    EXPECT_EQ(end.code, Code::kRankFailed);
    EXPECT_TRUE(Contains(end.message, "rank " + std::to_string(leaver) + " (pid"))
        << end.message;
    EXPECT_TRUE(Contains(end.message, "has left the job")) << end.message;
  });
  job.LeaveAll();
}

TEST_P(HostsTest, NothingIsDecidedWithoutTheCoordinator) {
  HostsJob job(GetParam());
  job.MeetAll();
  job.ForEach([&](Rank& self, int rank) {
    if (rank == 0) return self.Leave();
    const Status end = self.Run(Meet("without rank 0"));
    EXPECT_EQ(end.code, Code::kRankFailed);
    EXPECT_TRUE(Contains(end.message, "rank 0 (pid")) << end.message;
  });
  job.LeaveAll();
}

// One of them has heard of it, and has left with that error, when the others come.
TEST_P(HostsTest, WhoComesLateHearsWhoLeftFirst) {
  for (const int leaver : std::set<int>{1, size() - 1}) {
    for (int early = 0; early < leaver; ++early) {
      HostsJob job(GetParam());
      std::promise<void> left;
      const std::shared_future<void> early_left = left.get_future().share();
      job.MeetAll();
      job.ForEach([&](Rank& self, int rank) {
        if (rank == leaver) return self.Leave();
        if (rank != early) early_left.wait();
        const Status end = self.Run(Meet("without one"));
        if (rank == early) {
          self.Leave();
          left.set_value();
        }
        EXPECT_EQ(end.code, Code::kRankFailed);
        const std::string why = end.message.substr(end.message.find(": "));
        const std::string who = "rank " + std::to_string(leaver) + " (pid " +
                                std::to_string(getpid()) + " on host" +
                                std::to_string(GetParam().hosts[leaver]) + ")";
        EXPECT_EQ(why.find(who + " has left the job"), why.find("rank ")) << why;
      });
      job.LeaveAll();
    }
  }
}

// Rank 2, which has not left itself, and rank 0 know who has.
TEST(CutOffTest, TheLeaderThatLeftIsNamed) {
  for (const Layout& layout : {Layout{{0, 1, 1}}, Layout{{0, 1, 2}, 1}}) {
    HostsJob job(layout);
    job.ForEach([](Rank& self, int) {
      int32_t id = 0;
      ASSERT_EQ(self.engine().AddProcessSet({0, 2}, &id).message, "");
      ASSERT_EQ(id, 1);
    });
    job.MeetAll();
    job[1].Leave();
    Ask sum = Sum("in the set", {1});
    sum.description.process_set = 1;
    const Status end = job[0].Run(sum);
    EXPECT_EQ(end.code, Code::kRankFailed);
    const std::string host = std::to_string(layout.hosts[2]);
    EXPECT_TRUE(Contains(end.message, "on host" + host + ") was cut off from rank 0: " +
                                          "rank 1 (pid " + std::to_string(getpid()) +
                                          " on host1), between them, has left the job"))
        << end.message;
    job.LeaveAll();
  }
}

// A busy rank does not read its leader's messages, and more is decided than there is
// room for. Then rank 0 leaves.
TEST(BusyRankTest, DecisionsThatWaitForRoomComeBeforeADeparture) {
  const std::vector<float> values(2600, 1.0f);
  const auto submit = [&](Rank& self) {
    std::vector<size_t> numbers;
    for (int i = 0; i < 100; ++i) {
      numbers.push_back(self.Submit(Sum("sum " + std::to_string(i), values)));
    }
    return numbers;
  };
  HostsJob job(Layout{{0, 1, 1}});
  std::promise<void> is_busy, goes_on;
  std::vector<size_t> of_busy = submit(job[2]);
  std::thread busy([&] {
    Ask ask = Sum("busy", {1});
    ask.on_end = [&] {
      is_busy.set_value();
      goes_on.get_future().wait();
    };
    of_busy.push_back(job[2].Submit(ask));
  });
  for (int rank : {0, 1}) job[rank].Submit(Sum("busy", {1}));
  is_busy.get_future().wait();
  const std::vector<size_t> of_leader = submit(job[1]);
  for (size_t number : submit(job[0])) EXPECT_EQ(job[0].End(number).message, "");
  job[0].Leave();
  // Messages that have come are read before a sleep.
  const int64_t sleeps = job[1].counters().sleeps;
  EXPECT_TRUE(Eventually([&] { return job[1].counters().sleeps > sleeps + 2; }));
  EXPECT_LT(job[1].ended(), of_leader.size());
  goes_on.set_value();
  busy.join();
  for (size_t number : of_leader) ASSERT_EQ(job[1].End(number).message, "");
  for (size_t number : of_busy) ASSERT_EQ(job[2].End(number).message, "");
  job.LeaveAll();
}

TEST_P(HostsTest, AnErrorThatWasHandledIsNotWhyALeaderLeaves) {
  HostsJob job(GetParam());
  job.ForEach([&](Rank& self, int rank) {
    const std::vector<float> given(rank == size() - 1 ? 2 : 1);
    EXPECT_EQ(self.Run(Sum("one differs", given)).code, Code::kMismatch);
    EXPECT_EQ(self.Run(Meet("all have gone on")).message, "");
    if (rank == 0) return self.Leave();
    const Status end = self.Run(Meet("without one"));
    EXPECT_EQ(end.code, Code::kRankFailed);
    EXPECT_TRUE(Contains(end.message, "rank 0 ")) << end.message;
    EXPECT_FALSE(Contains(end.message, "After this error")) << end.message;
  });
  job.LeaveAll();
}

// Rank 0 has its own result, and leaves, before the decision has come to all.
TEST_P(HostsTest, WhatWasDecidedBeforeTheCoordinatorLeftIsCarriedOut) {
  for (int repeat = 0; repeat < 30; ++repeat) {
    HostsJob job(GetParam());
    job.ForEach([&](Rank& self, int) {
      EXPECT_EQ(self.Run(Sum("the last", {1.0f})).message, "");
      self.Leave();
    });
  }
}

// Where a rank then fails the job. It may be ahead of others, whose barrier then fails.
void MeetFirst(Rank* self) {
  const Status end = self->Run(Meet("all are there"));
  EXPECT_TRUE(end.ok() || Contains(end.message, "made to fail")) << end.message;
}

TEST_P(HostsTest, AFailureEndsAllHosts) {
  HostsJob job(GetParam());
  job.ForEach([&](Rank& self, int rank) {
    MeetFirst(&self);
    if (rank == size() - 1) {
      job.StateOf(rank).Fail(Code::kInternal, "made to fail");
    }
    const Status end = self.Run(Meet("after it"));
    EXPECT_EQ(end.code, Code::kInternal);
    EXPECT_TRUE(Contains(end.message, "made to fail")) << end.message;
  });
  job.LeaveAll();
}

TEST_P(HostsTest, OneReportSaysWhatTheRanksOfAllHostsDid) {
  for (int failing = 0; failing < size(); ++failing) {
    CapturedErrors errors;
    {
      HostsJob job(GetParam());
      job.ForEach([&](Rank& self, int rank) {
        MeetFirst(&self);
        if (rank == failing) job.StateOf(rank).Fail(Code::kInternal, "made to fail");
        EXPECT_FALSE(self.Run(Meet("after it")).ok());
        self.Leave();
      });
      for (int rank = 0; rank < size(); ++rank) {
        EXPECT_EQ(job.StateOf(rank).header().all_know.load(), 1u);
      }
    }
    const std::string report = errors.text();
    EXPECT_EQ(Count(report, "What each rank did last:"), 1u) << report;
    EXPECT_EQ(Count(report, "made to fail"), 1u) << report;
    for (int rank = 0; rank < size(); ++rank) {
      const std::string line = "\n  rank " + std::to_string(rank) + " (pid ";
      const std::string did = report.substr(std::min(report.find(line), report.size()));
      EXPECT_TRUE(Contains(did.substr(0, did.find('\n', 1)), "barrier 'a")) << report;
    }
  }
}

TEST_P(HostsTest, TheTimelineHasARowForEachOtherHost) {
  const std::string path = Path("hosts.json");
  HostsJob job(GetParam());
  ASSERT_TRUE(job[0].engine().StartTimeline(path, false).ok());
  job.ForEach([&](Rank& self, int) {
    for (int step = 0; step < 200; ++step) {
      EXPECT_EQ(self.Run(Sum("a", {1.0f})).message, "");
    }
  });
  job[0].engine().StopTimeline();
  job.LeaveAll();
  std::map<double, double> reached;  // by row
  std::multiset<std::string> rows;
  for (const std::string& event : Events(path)) {
    if (Number(event, "pid") != 2) continue;
    const double row = Number(event, "tid");
    if (Text(event, "name") == "thread_name") {
      reached[row] = -1e18;
      rows.insert(event.substr(event.find("\"args\"")));
    } else if (Text(event, "name") == "ALLREDUCE") {
      EXPECT_EQ(Text(event, "tensors"), "a");
      ASSERT_EQ(reached.count(row), 1u) << event;
      // Some nanoseconds are lost when both are rounded.
      EXPECT_GE(Number(event, "ts"), reached[row] - 0.01) << event;
      EXPECT_GE(Number(event, "dur"), 0) << event;
      reached[row] = Number(event, "ts") + Number(event, "dur");
    }
  }
  const Topology topology = GetParam().Of(0);
  EXPECT_EQ(rows.size(), static_cast<size_t>(topology.hosts()) - 1);
  for (int host = 1; host < topology.hosts(); ++host) {
    const std::string leader =
        "rank " + std::to_string(topology.leader_of(host)) + " (";
    EXPECT_TRUE(std::any_of(rows.begin(), rows.end(), [&](const std::string& row) {
      return Contains(row, leader);
    })) << leader;
  }
}

// Of sets that do not have it: one of ranks above and below it in the tree, and one of
// a rank of its own host, whose submissions wake it only for such a set.
TEST(IdleLeaderTest, ForwardsForSetsThatItIsNotInAndSleepsInBetween) {
  HostsJob job({{0, 1, 2, 1}, 1});
  const std::vector<std::vector<int>> sets = {{0, 2}, {0, 3}};
  job.ForEach([&](Rank& self, int) {
    for (const std::vector<int>& set : sets) {
      int32_t id = 0;
      ASSERT_EQ(self.engine().AddProcessSet(set, &id).message, "");
    }
  });
  constexpr int kRounds = 100;
  Rank& idle = job[1];
  const int64_t batches = idle.counters().batches;
  for (size_t set = 0; set < sets.size(); ++set) {
    const int32_t id = static_cast<int32_t>(set + 1);
    const int first = sets[set].front(), last = sets[set].back();
    // It has nothing under way, and nobody has asked it for anything for a while.
    ASSERT_TRUE(idle.AwaitRest());
    const Clock::time_point begin = Clock::now();
    for (int round = 0; round < kRounds; ++round) {
      // Within the messages, and over the connections of the ranks that reduce them.
      const std::vector<float> own(round % 2 == 0 ? 3 : 5000, 1.0f + round);
      const int64_t sleeps = idle.counters().sleeps;
      const size_t below = job[last].Submit(In(id, Sum("sum", own)));
      // It does not watch for the next request, however soon that always comes.
      ASSERT_TRUE(Eventually([&] { return idle.counters().sleeps > sleeps; }));
      const size_t above = job[first].Submit(In(id, Sum("sum", own)));
      for (const auto& [rank, number] : {std::pair(first, above), {last, below}}) {
        ASSERT_EQ(job[rank].End(number).message, "");
        ASSERT_EQ(FromBytes<float>(job[rank].Output(number)),
                  std::vector<float>(own.size(), 2 + 2.0f * round));
      }
    }
    // It is woken at once, not when the waiting rank looks for stalls.
    EXPECT_LT(Clock::now() - begin, kRounds * StallWatch::kInterval / 2);
  }
  EXPECT_EQ(idle.counters().batches, batches);
  job.LeaveAll();
}

INSTANTIATE_TEST_SUITE_P(Layouts, HostsTest,
                         testing::Values(Layout{{0, 1}}, Layout{{0, 1, 1, 0}},
                                         Layout{{0, 0, 0, 1}}, Layout{{0, 1, 2}, 1},
                                         Layout{{0, 1, 2, 3, 0, 1, 2}, 2},
                                         Layout{{0, 1, 1, 0}, 2, true},
                                         Layout{{0, 1, 2}, 1, true}));

// The ranks of a job as processes, each alone on its host.
class Processes {
 public:
  // They run `body(rank's engine, rank, link)` once all are there.
  template <typename Body>
  Processes(const Layout& layout, const EngineOptions& options, const Body& body) {
    LinkMesh mesh(layout);
    std::vector<RankName> names;
    for (int rank = 0; rank < layout.size(); ++rank) {
      names.push_back({4242, "host" + std::to_string(rank)});
    }
    for (int rank = 0; rank < layout.size(); ++rank) {
      children_.push_back(std::make_unique<Child>([&, rank](const Child::Link& link) {
        const std::vector<Link> own = mesh.TakeAlone(rank);
        std::shared_ptr<Segment> segment;
        EXPECT_TRUE(Segment::CreateLocal(1, kTinyExchange, &segment).ok());
        Rank self(options, HostsWorld(layout.Of(rank), segment, names, own));
        EXPECT_EQ(self.Run(Meet("all are there")).message, "");
        link.Tell("there");
        body(&self, rank, link);
        self.Leave();
        return testing::Test::HasFailure() ? 1 : 0;
      }));
    }
    mesh.Close();
    for (const auto& child : children_) EXPECT_EQ(child->Line(), "there");
  }

  Child& operator[](int rank) { return *children_[rank]; }

 private:
  std::vector<std::unique_ptr<Child>> children_;
};

// All that the engine does then goes over connections.
TEST(ProcessesTest, RandomCollectivesOfHostsThatShareNothing) {
  for (const Layout& layout : {Layout{{0, 1}}, Layout{{0, 1, 2}}}) {
    const int size = layout.size();
    EngineOptions options;
    options.check = true;
    std::mt19937_64 random(size);
    std::vector<Plan> plans;
    for (int i = 0; i < 300; ++i) {
      const bool is_of_last = i % 10 == 0;
      plans.push_back(PlanForHosts(i, is_of_last ? 1 : size, &random));
      if (is_of_last) plans.back().GiveTo(1, {size - 1});
    }
    Processes ranks(layout, options, [&](Rank* self, int rank, const Child::Link&) {
      int32_t id = 0;
      EXPECT_EQ(self->engine().AddProcessSet({size - 1}, &id).message, "");
      RunAll(self, rank, plans);
      EXPECT_EQ(self->engine().RemoveProcessSet(id).message, "");
      const Status end = self->Run(Sum("differs", std::vector<float>(1 + rank)));
      EXPECT_EQ(end.code, Code::kMismatch);
      EXPECT_EQ(self->Run(Meet("after it")).message, "");
    });
    for (int rank = 0; rank < size; ++rank) EXPECT_EQ(ranks[rank].Reap(), 0);
  }
}

// Makes a request that fails, and returns the reason.
std::string WhyFailed(Rank* self) {
  const Status end = self->Run(Meet("without one"));
  EXPECT_EQ(end.code, Code::kRankFailed);
  const size_t why = end.message.find(": ");
  return end.message.substr(why == std::string::npos ? 0 : why);
}

void KillEachOnce(const Layout& layout) {
  for (int victim = 0; victim < layout.size(); ++victim) {
    CapturedErrors errors;
    Processes ranks(layout, {}, [&](Rank* self, int rank, const Child::Link& link) {
      if (rank == victim) link.Await();
      link.Tell(WhyFailed(self));
    });
    ranks[victim].Kill(SIGKILL);
    const std::string who = "rank " + std::to_string(victim) + " (pid 4242 on host" +
                            std::to_string(victim) + ")";
    for (int rank = 0; rank < layout.size(); ++rank) {
      if (rank == victim) continue;
      const std::string error = ranks[rank].Line();
      EXPECT_TRUE(Contains(error, ": " + who + " has gone without a word")) << error;
    }
    for (int rank = 0; rank < layout.size(); ++rank) {
      EXPECT_EQ(ranks[rank].Reap(), rank == victim ? SIGKILL : 0);
    }
    // Ranks that the dead one kept together report together.
    EXPECT_EQ(Count(errors.text(), "What each rank did last:"), 1u) << errors.text();
    EXPECT_EQ(Count(errors.text(), "did not answer"), 1u) << errors.text();
    EXPECT_TRUE(Contains(errors.text(), who + ": its host did not answer"));
  }
}

TEST(HostsDeathTest, AKilledLeaderEndsTheOtherHostsInARow) {
  KillEachOnce({{0, 1, 2, 3}, 1});
}

TEST(HostsDeathTest, AKilledLeaderEndsTheOtherHostsOverTls) {
  KillEachOnce({{0, 1, 2}, 1, /*tls=*/true});
}

// Rank 0 ends the job, and its process ends as soon as its own request has.
TEST(HostsDeathTest, WhoseFailureIsKnownIsNotAFailureOfItsOwn) {
  CapturedErrors errors;
  EngineOptions options;
  options.stall_abort_seconds = 2;
  const auto body = [](Rank* self, int rank, const Child::Link& link) {
    if (rank == 0) {
      Ask ask = Meet("without one");
      ask.on_end = [] { _exit(0); };
      self->AwaitEnd(self->Submit(std::move(ask)));
    }
    if (rank == 2) link.Await();
    link.Tell(WhyFailed(self));
  };
  Processes ranks({{0, 1, 2}, 1}, options, body);
  ranks[0].Reap();
  ranks[2].Go();
  for (const int rank : {1, 2}) {
    const std::string error = ranks[rank].Line();
    EXPECT_TRUE(Contains(error, "which not every rank has reached")) << error;
    EXPECT_EQ(ranks[rank].Reap(), 0);
  }
}

TEST(HostsDeathTest, AKilledLeaderEndsTheOtherHostsInATree) {
  KillEachOnce({{0, 1, 2, 3, 4, 5}, 2});
}

}  // namespace
}  // namespace keras_hvd
