// Tensors that travel within messages: their decisions, and that their results have the
// bits that the exchange of larger ones gives.
#include "tf_ops/operation/inline_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tf_ops/coordination/coordinator_testing.h"
#include "tf_ops/engine/engine_testing.h"

namespace keras_hvd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

void Give(Coordinator* coordinator, int rank, const Description& description,
          const std::string& input) {
  MergedSubmission submission;
  submission.description = Share(description);
  submission.ranks = {rank};
  submission.inputs = {input};
  coordinator->Submit(std::move(submission), 0);
}

// ---- The state machine

TEST(GivenInputsTest, ComeWithTheDecisionInTheOrderOfRanks) {
  Coordinator coordinator(3, kFusionBytes);
  for (int rank : {2, 0, 1}) {
    Give(&coordinator, rank, Allreduce("a"), "of " + std::to_string(rank));
  }
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  ASSERT_EQ(decisions[0].given.size(), 1u);
  EXPECT_THAT(decisions[0].given[0].inputs, ElementsAre("of 0", "of 1", "of 2"));
}

TEST(GivenInputsTest, AreOfNoUseWhereAMemberGaveNone) {
  Coordinator coordinator(2, kFusionBytes);
  Give(&coordinator, 0, Allreduce("a"), "x");
  Submit(&coordinator, 1, Share(Allreduce("a")), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
  EXPECT_THAT(decisions[0].given, IsEmpty());
}

TEST(GivenInputsTest, AreFusedWithTheirLike) {
  Coordinator coordinator(2, kFusionBytes);
  for (const char* name : {"a", "large", "b", "large too"}) {
    for (int rank : {0, 1}) {
      if (name[0] == 'l') {
        Submit(&coordinator, rank, Share(Allreduce(name)), 0);
      } else {
        Give(&coordinator, rank, Allreduce(name), name + std::to_string(rank));
      }
    }
  }
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_THAT(Names(decisions[0]), ElementsAre("a", "b"));
  ASSERT_EQ(decisions[0].given.size(), 2u);
  EXPECT_THAT(decisions[0].given[1].inputs, ElementsAre("b0", "b1"));
  EXPECT_THAT(Names(decisions[1]), ElementsAre("large", "large too"));
  EXPECT_THAT(decisions[1].given, IsEmpty());
}

TEST(GivenInputsTest, OfARankThatHasJoinedAreZeros) {
  Coordinator coordinator(3, kFusionBytes);
  Submit(&coordinator, 1, Share(Join()), 0);
  Give(&coordinator, 2, Allreduce("a"), "of 2");
  Give(&coordinator, 0, Allreduce("a"), "of 0");
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  ASSERT_EQ(decisions[0].given.size(), 1u);
  EXPECT_THAT(decisions[0].given[0].inputs, ElementsAre("of 0", "", "of 2"));
  ASSERT_EQ(decisions[0].zeros.size(), 1u);
  EXPECT_THAT(decisions[0].zeros[0].ranks, ElementsAre(1));
}

TEST(GivenInputsTest, OfOneCallAreNotTakenForAnother) {
  Coordinator coordinator(2, 0);
  for (const char* call : {"first", "second"}) {
    Give(&coordinator, 0, Allreduce("a"), call);
  }
  for (const char* call : {"FIRST", "SECOND"}) {
    Give(&coordinator, 1, Allreduce("a"), call);
  }
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_THAT(decisions[0].given[0].inputs, ElementsAre("first", "FIRST"));
  EXPECT_THAT(decisions[1].given[0].inputs, ElementsAre("second", "SECOND"));
}

TEST(GivenInputsTest, OfAMismatchAreForgotten) {
  Coordinator coordinator(2, kFusionBytes);
  Give(&coordinator, 0, Allreduce("a", 3), "three");
  Give(&coordinator, 1, Allreduce("a", 4), "four");
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kFail);
  EXPECT_THAT(decisions[0].given, IsEmpty());
}

// ---- Tensors that travel so

TEST(TravelsInlineTest, WhatIsSmallAndReducedElementByElement) {
  const auto travels = [](const Description& description, size_t members = 2) {
    return TravelsInline(description, members, /*most_bytes=*/40);
  };
  EXPECT_TRUE(travels(Allreduce("a", 10)));
  EXPECT_FALSE(travels(Allreduce("a", 11)));
  EXPECT_FALSE(travels(Allreduce("a", 0)));
  EXPECT_FALSE(travels(Allreduce("a", 1), 1));
  EXPECT_FALSE(travels(Allreduce("a", 1, ReduceOp::kAdasum)));
  EXPECT_FALSE(travels(Broadcast("a")));
  Description on_gpu = Allreduce("a", 1);
  on_gpu.on_gpu = true;
  EXPECT_FALSE(travels(on_gpu));
}

TEST(TravelsInlineTest, MoreBetweenHostsUnlessThereAreManyRanks) {
  EXPECT_EQ(MostInlineBytes(2, 1), 1 << 10);
  EXPECT_EQ(MostInlineBytes(2, 2), 16 << 10);
  EXPECT_EQ(MostInlineBytes(8, 4), 4 << 10);
  EXPECT_EQ(MostInlineBytes(64, 8), 512);
  EXPECT_EQ(MostInlineBytes(64, 1), 512);
}

// ---- The bits

class InlineBitsTest : public testing::TestWithParam<int> {};

// A group of tensors of odd sizes; `padding` elements make it too large to travel so.
Ask Group(const std::string& name, DataType dtype, ReduceOp op, int rank,
          int64_t padding) {
  Ask ask;
  ask.description.name = name;
  ask.description.reduction = {op, dtype == DataType::kFloat32 ? 0.3 : 1, 1};
  uint64_t seed = 100 * static_cast<uint64_t>(dtype) + static_cast<uint64_t>(op);
  for (int64_t elements : {1, 13, 0, 29, 1}) {
    ask.description.tensors.push_back({dtype, {elements}});
    Buffer bytes = RandomBytes(elements * Bytes(dtype), 16 * ++seed + rank);
    for (char& byte : bytes) {
      // Truth values; else numbers that are no NaN, whose payload may be any.
      byte &= dtype == DataType::kBool ? 1 : 0xBB;
    }
    ask.input.insert(ask.input.end(), bytes.begin(), bytes.end());
  }
  ask.description.tensors.push_back({dtype, {padding}});
  ask.input.resize(ask.input.size() + padding * Bytes(dtype));
  return ask;
}

TEST_P(InlineBitsTest, AreThoseOfLargerTensors) {
  Job job(GetParam());
  job.ForEach([&](Rank& self, int rank) {
    for (int type = 0; type < kDataTypes; ++type) {
      const auto dtype = static_cast<DataType>(type);
      for (ReduceOp op : {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin,
                          ReduceOp::kMax, ReduceOp::kProduct}) {
        const Ask small = Group("small", dtype, op, rank, 0);
        if (!Supports(small.description.reduction, dtype)) continue;
        const int64_t most = MostInlineBytes(GetParam(), /*hosts=*/1);
        ASSERT_TRUE(TravelsInline(small.description, 2, most));
        const size_t given = small.input.size();
        const Ask large = Group("large", dtype, op, rank, most);
        ASSERT_FALSE(TravelsInline(large.description, 2, most));
        const size_t one = self.Submit(small), other = self.Submit(large);
        ASSERT_TRUE(self.End(one).ok() && self.End(other).ok());
        Buffer expected = self.Output(other);
        expected.resize(given);
        EXPECT_EQ(self.Output(one), expected) << Name(dtype) << " " << Name(op);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, InlineBitsTest, testing::Range(1, 5));

}  // namespace
}  // namespace keras_hvd
