// Requests come about on engines of several ranks, in any order. The names of the other
// engine_..._test.cc say their subjects.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tf_ops/engine/engine_testing.h"
#include "tf_ops/engine/random_plan_testing.h"

namespace keras_hvd {
namespace {

class RanksTest : public testing::TestWithParam<int> {};

TEST_P(RanksTest, MixedCollectivesInAnotherOrderOnEachRank) {
  const int size = GetParam();
  std::mt19937_64 random(size);
  std::vector<Plan> plans;
  for (int i = 0; i < 150; ++i) plans.push_back(RandomPlan(i, size, &random));
  for (int run = 0; run < 3; ++run) {
    EngineOptions options;
    options.cores = run == 0 ? size : 1;  // with spinning and without
    options.fusion_bytes = run == 1 ? 4000 : 64 << 20;
    options.check = run == 2;
    options.cache_capacity = run == 0 ? 16384 : 4 * (run - 1);
    Job job(size, options);
    job.ForEach([&](Rank& self, int rank) {
      RunAll(&self, rank, plans, run * 10);
      EXPECT_EQ(self.counters().tensors, static_cast<int64_t>(plans.size()));
    });
  }
}

// Sums whose value depends on the order of addition, fused and sliced as it happens.
TEST_P(RanksTest, SameBitsInEveryRunAndOnEveryRank) {
  const int size = GetParam();
  std::set<std::vector<Buffer>> results;
  for (int run = 0; run < 4; ++run) {
    Job job(size);
    std::vector<std::vector<Buffer>> outputs(size, std::vector<Buffer>(100));
    job.ForEach([&](Rank& self, int rank) {
      std::mt19937 random(rank), order_of_run(run * 100 + rank);
      std::vector<std::vector<float>> inputs(100);
      for (auto& input : inputs) {
        input.resize(1 + random() % 700);
        for (float& value : input) {
          value = std::ldexp(static_cast<float>(random()), random() % 64);
        }
      }
      // The same sizes on all ranks.
      std::mt19937 sizes(7);
      for (auto& input : inputs) input.resize(1 + sizes() % 700, 1.5f);
      std::vector<size_t> order(inputs.size()), numbers(inputs.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), order_of_run);
      for (size_t i : order) {
        numbers[i] = self.Submit(Sum("t" + std::to_string(i), inputs[i]));
      }
      for (size_t i = 0; i < numbers.size(); ++i) {
        ASSERT_TRUE(self.End(numbers[i]).ok());
        outputs[rank][i] = self.Output(numbers[i]);
      }
    });
    results.insert(outputs.begin(), outputs.end());
  }
  EXPECT_EQ(results.size(), 1u);
}

TEST_P(RanksTest, OneNameIsServedInOrder) {
  Job job(GetParam());
  job.ForEach([&](Rank& self, int) {
    for (int i = 0; i < 200; ++i) self.Submit(Sum("x", {static_cast<float>(i)}));
    for (int i = 0; i < 200; ++i) {
      ASSERT_TRUE(self.End(i).ok());
      ASSERT_EQ(FromBytes<float>(self.Output(i))[0], i * GetParam());
    }
  });
}

TEST_P(RanksTest, ManyThreadsMaySubmit) {
  Job job(GetParam());
  job.ForEach([&](Rank& self, int) {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&self, thread] {
        for (int i = 0; i < 50; ++i) {
          const std::string name = std::to_string(thread) + "/" + std::to_string(i);
          const size_t number = self.Submit(Sum(name, {1, 2, 3}));
          ASSERT_TRUE(self.End(number).ok());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    self.CheckEnds();
  });
}

// As a graph does it: the end of one request starts the next.
TEST_P(RanksTest, CallersThatWaitDriveBesideThreadsThatSubmit) {
  EngineOptions options;
  options.cores = GetParam() % 2 == 0 ? GetParam() : 1;  // with spinning and without
  Job job(GetParam(), options);
  const float size = GetParam();
  job.ForEach([&](Rank& self, int) {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        const std::vector<float> input =
            thread % 2 == 0 ? std::vector<float>{1, 1, 1} : kManyValues;
        const std::vector<float> expected(input.size(), size);
        for (int i = 0; i < 50; ++i) {
          Ask ask = Sum(std::to_string(thread), input);
          size_t number;
          if (thread < 2) {
            ASSERT_TRUE(self.Drive(std::move(ask), &number).ok());
          } else {
            number = self.Submit(std::move(ask));
            ASSERT_TRUE(self.End(number).ok());
          }
          ASSERT_EQ(FromBytes<float>(self.Output(number)), expected);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    self.CheckEnds();
  });
}

TEST_P(RanksTest, DoneMaySubmit) {
  constexpr int kLinks = 200;
  Job job(GetParam());
  job.ForEach([&](Rank& self, int) {
    std::atomic<int> links{0};
    std::function<void()> next = [&] {
      if (++links > kLinks) return;
      Ask ask = Sum("link" + std::to_string(links), {1});
      ask.on_end = next;
      self.Submit(std::move(ask));
    };
    next();
    ASSERT_TRUE(Eventually([&] { return self.ended() == kLinks; }));
    self.CheckEnds();
  });
}

TEST_P(RanksTest, WhatIsReadyTogetherIsFused) {
  Job job(GetParam());
  // Rank 0 decides nothing until everything is there.
  std::atomic<bool> closed{false}, complete{false};
  Ask gate = Sum("gate", kManyValues);
  gate.on_end = [&] {
    closed = true;
    EXPECT_TRUE(Eventually([&] { return complete.load(); }));
  };
  job[0].Submit(gate);
  for (int rank = 1; rank < job.size(); ++rank)
    job[rank].Submit(Sum("gate", kManyValues));
  ASSERT_TRUE(Eventually([&] { return closed.load(); }));
  for (int rank = 0; rank < job.size(); ++rank) {
    for (int i = 0; i < 300; ++i) job[rank].Submit(Sum(std::to_string(i), {1, 2}));
  }
  complete = true;
  job.ForEach([](Rank& self, int) {
    self.EndAll();
    EXPECT_EQ(self.counters().batches, 2);
    EXPECT_EQ(self.counters().tensors, 301);
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, RanksTest, testing::Range(1, 6));

TEST(EngineTest, AllgathersBytesAreCounted) {
  Job job(2);
  job.ForEach([](Rank& self, int rank) {
    EXPECT_TRUE(self.Run(Gather("x", std::vector<int32_t>(3 + rank, 1))).ok());
    EXPECT_EQ(self.counters().bytes, (3 + rank) * 4);
  });
}

TEST(EngineTest, WithoutMemoryAnAllgatherFailsOnThatRankAlone) {
  Job job(3);
  job.ForEach([](Rank& self, int rank) {
    Ask ask = Gather("x", std::vector<int32_t>(5000, rank));
    ask.has_memory = rank != 1;
    const Status status = self.Run(std::move(ask));
    EXPECT_EQ(status.code, rank == 1 ? Code::kInternal : Code::kOk);
    if (rank == 1) {
      EXPECT_EQ(status.message,
                "allgather 'x': there is no memory for the result on rank 1");
    }
    EXPECT_TRUE(self.Run(Meet("and on it goes")).ok());
  });
}

}  // namespace
}  // namespace keras_hvd
