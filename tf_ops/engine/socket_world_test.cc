// The engine of processes that share no memory: all that it does goes through the
// interfaces of World.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tf_ops/engine/engine_testing.h"
#include "tf_ops/engine/random_plan_testing.h"
#include "tf_ops/engine/socket_world_testing.h"
#include "tf_ops/testing/child.h"

namespace keras_hvd {
namespace {

constexpr int kRequests = 300;

using Body = std::function<void(Rank& self, int rank)>;

// Runs `body` on all ranks, each in a process of its own; this one is rank 0.
class SocketJobs {
 public:
  SocketJobs(int size, const Body& body, EngineOptions options = {}) {
    SocketMesh mesh(size);
    for (int rank = 1; rank < size; ++rank) {
      children_.push_back(std::make_unique<Child>([&, rank](const Child::Link& link) {
        Start(mesh.Take(rank), rank, body, options);
        link.Tell(testing::Test::HasFailure() ? "failed" : "done");
        return 0;
      }));
    }
    ends_ = mesh.Take(0);
    Start(ends_, 0, body, options);
  }

  Child& child(int rank) { return *children_[rank - 1]; }

  void ExpectAllDone() {
    for (const auto& child : children_) EXPECT_EQ(child->Line(), "done");
  }

 private:
  static void Start(const SocketEnds& ends, int rank, const Body& body,
                    EngineOptions options) {
    Rank self(options, SocketWorld(ends, rank));
    body(self, rank);
  }

  std::vector<std::unique_ptr<Child>> children_;
  SocketEnds ends_;
};

class SocketWorldTest : public testing::TestWithParam<int> {};

TEST_P(SocketWorldTest, RandomCollectivesInAnyOrder) {
  const int size = GetParam();
  const Body body = [size](Rank& self, int rank) {
    std::mt19937_64 random(size);
    std::vector<Plan> plans;
    for (int i = 0; i < kRequests; ++i) plans.push_back(RandomPlan(i, size, &random));
    std::vector<int> order(kRequests), number(kRequests);
    for (int i = 0; i < kRequests; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(rank));
    for (int i : order) number[i] = self.Submit(plans[i].asks[rank]);
    self.EndAll();
    for (int i = 0; i < kRequests; ++i) {
      const Status end = self.End(number[i]);
      EXPECT_TRUE(end.ok()) << end.message;
      EXPECT_EQ(self.Output(number[i]), plans[i].expected[rank])
          << Title(plans[i].asks[rank].description);
    }
  };
  SocketJobs(size, body).ExpectAllDone();
}

TEST_P(SocketWorldTest, ProcessSetsAndOutputsThatAreCompared) {
  const int size = GetParam();
  const Body body = [size](Rank& self, int rank) {
    int32_t id = 0;
    EXPECT_TRUE(self.engine().AddProcessSet({size - 1}, &id).ok());
    if (rank == size - 1) {
      Ask ask = Sum("of one", {1.5f});
      ask.description.process_set = id;
      EXPECT_TRUE(self.Run(std::move(ask)).ok());
    }
    const size_t all =
        self.Submit(Sum("of all", std::vector<float>(1000, 1.0f + rank)));
    EXPECT_TRUE(self.End(all).ok());
    EXPECT_EQ(FromBytes<float>(self.Output(all))[999], size * (size + 1) / 2.0f);
    EXPECT_TRUE(self.engine().RemoveProcessSet(id).ok());
  };
  EngineOptions options;
  options.check = true;
  SocketJobs(size, body, options).ExpectAllDone();
}

TEST_P(SocketWorldTest, WhatRanksDisagreeAboutIsAnErrorOnAll) {
  const Body body = [](Rank& self, int rank) {
    const Status end = self.Run(Sum("differs", std::vector<float>(1 + rank)));
    EXPECT_EQ(end.code, Code::kMismatch);
    EXPECT_TRUE(self.Run(Meet("after it")).ok());
  };
  SocketJobs(GetParam(), body).ExpectAllDone();
}

TEST_P(SocketWorldTest, ADeathEndsWhatWaits) {
  const Body body = [](Rank& self, int rank) {
    EXPECT_TRUE(self.Run(Meet("all are there")).ok());
    // It dies once the others are through.
    Ask ask = Sum("all are through", {1.0f});
    if (rank != 1) {
      self.Submit(std::move(ask));
    } else {
      EXPECT_TRUE(self.Run(std::move(ask)).ok());
      raise(SIGKILL);
    }
    const Status end = self.Run(Meet("without rank 1"));
    EXPECT_EQ(end.code, Code::kRankFailed);
    EXPECT_TRUE(Contains(end.message, "rank 1 behind a socket has gone"))
        << end.message;
  };
  SocketJobs job(GetParam(), body);
  for (int rank = 2; rank < GetParam(); ++rank)
    EXPECT_EQ(job.child(rank).Line(), "done");
}

INSTANTIATE_TEST_SUITE_P(Ranks, SocketWorldTest, testing::Values(2, 3));

}  // namespace
}  // namespace keras_hvd
