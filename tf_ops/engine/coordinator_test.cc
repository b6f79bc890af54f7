// The order of the collectives: what the coordinator promises case by case, and over
// thousands of random schedules.
#include "tf_ops/engine/coordinator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <random>
#include <set>
#include <tuple>

namespace keras_hvd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Shared = std::shared_ptr<const Description>;

constexpr int64_t kFusionBytes = 1000;

Description Allreduce(const std::string& name, int64_t floats = 10,
                      ReduceOp op = ReduceOp::kSum, int32_t process_set = 0) {
  Description description;
  description.process_set = process_set;
  description.name = name;
  description.reduction.op = op;
  description.tensors = {{DataType::kFloat32, {floats}}};
  return description;
}

Description Broadcast(const std::string& name, int32_t root = 0) {
  Description description = Allreduce(name);
  description.kind = Kind::kBroadcast;
  description.root = root;
  return description;
}

Description Barrier(const std::string& name) {
  Description description;
  description.name = name;
  description.kind = Kind::kBarrier;
  return description;
}

Shared Share(Description description) {
  return std::make_shared<const Description>(std::move(description));
}

void SubmitOnAll(Coordinator* coordinator, int size, const Description& description) {
  for (int rank = 0; rank < size; ++rank) {
    coordinator->Submit(rank, Share(description), 0);
  }
}

std::vector<Decision> TakeAll(Coordinator* coordinator) {
  std::vector<Decision> decisions;
  Decision decision;
  while (coordinator->Next(&decision)) decisions.push_back(decision);
  return decisions;
}

std::vector<std::string> Names(const Decision& decision) {
  std::vector<std::string> names;
  for (const TensorKey& key : decision.tensors) names.push_back(key.name);
  return names;
}

TEST(CoordinatorTest, NothingRunsBeforeTheLastRankHasSubmitted) {
  Coordinator coordinator(3, kFusionBytes);
  coordinator.Submit(2, Share(Allreduce("a")), 0);
  coordinator.Submit(0, Share(Allreduce("a")), 0);
  EXPECT_THAT(TakeAll(&coordinator), IsEmpty());
  coordinator.Submit(1, Share(Allreduce("a")), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(0, 1, 2));
  EXPECT_THAT(Names(decisions[0]), ElementsAre("a"));
}

TEST(CoordinatorTest, OrderIsThatInWhichTheLastRanksCame) {
  Coordinator coordinator(2, 0);
  for (const char* name : {"a", "b", "c"}) {
    coordinator.Submit(0, Share(Allreduce(name)), 0);
  }
  std::vector<std::string> order;
  for (const char* name : {"c", "a", "b"}) {
    coordinator.Submit(1, Share(Allreduce(name)), 0);
  }
  for (const Decision& decision : TakeAll(&coordinator)) {
    order.push_back(Names(decision).front());
  }
  EXPECT_THAT(order, ElementsAre("c", "a", "b"));
}

TEST(CoordinatorTest, AWorldOfOneRunsAtOnce) {
  Coordinator coordinator(1, kFusionBytes);
  coordinator.Submit(0, Share(Barrier("b")), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(0));
}

// ---- Fusion

TEST(FusionTest, WhatIsReadyTogetherTravelsTogether) {
  Coordinator coordinator(2, kFusionBytes);
  for (const char* name : {"a", "b", "c"})
    SubmitOnAll(&coordinator, 2, Allreduce(name));
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_THAT(Names(decisions[0]), ElementsAre("a", "b", "c"));
}

TEST(FusionTest, StopsAtTheLimitAndFillsUpWithWhatFits) {
  Coordinator coordinator(1, 100);
  SubmitOnAll(&coordinator, 1, Allreduce("fifteen", 15));
  SubmitOnAll(&coordinator, 1, Allreduce("eleven", 11));
  SubmitOnAll(&coordinator, 1, Allreduce("ten", 10));
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 2u);
  // 100 bytes exactly.
  EXPECT_THAT(Names(decisions[0]), ElementsAre("fifteen", "ten"));
  EXPECT_THAT(Names(decisions[1]), ElementsAre("eleven"));
}

TEST(FusionTest, ATensorAboveTheLimitTravelsAlone) {
  Coordinator coordinator(1, 100);
  SubmitOnAll(&coordinator, 1, Allreduce("huge", 1000));
  SubmitOnAll(&coordinator, 1, Allreduce("small", 1));
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_THAT(Names(decisions[0]), ElementsAre("huge"));
  EXPECT_THAT(Names(decisions[1]), ElementsAre("small"));
}

TEST(FusionTest, TypesMayDifferButReductionsMayNot) {
  Coordinator coordinator(1, kFusionBytes);
  Description doubles = Allreduce("doubles");
  doubles.tensors[0].dtype = DataType::kFloat64;
  Description scaled = Allreduce("scaled");
  scaled.reduction.prescale = 2;
  SubmitOnAll(&coordinator, 1, Allreduce("floats"));
  SubmitOnAll(&coordinator, 1, Allreduce("average", 10, ReduceOp::kAverage));
  SubmitOnAll(&coordinator, 1, scaled);
  SubmitOnAll(&coordinator, 1, doubles);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 3u);
  EXPECT_THAT(Names(decisions[0]), ElementsAre("floats", "doubles"));
  EXPECT_THAT(Names(decisions[1]), ElementsAre("average"));
  EXPECT_THAT(Names(decisions[2]), ElementsAre("scaled"));
}

TEST(FusionTest, OnlyAllreducesOfOneProcessSetFuse) {
  Coordinator coordinator(2, kFusionBytes);
  coordinator.AddProcessSet(1, {0, 1});
  SubmitOnAll(&coordinator, 2, Allreduce("a"));
  SubmitOnAll(&coordinator, 2, Broadcast("b"));
  SubmitOnAll(&coordinator, 2, Broadcast("c"));
  SubmitOnAll(&coordinator, 2, Allreduce("a", 10, ReduceOp::kSum, 1));
  SubmitOnAll(&coordinator, 2, Barrier("d"));
  std::vector<std::string> order;
  for (const Decision& decision : TakeAll(&coordinator)) {
    ASSERT_EQ(decision.tensors.size(), 1u);
    order.push_back(Names(decision).front() +
                    std::to_string(decision.tensors[0].process_set));
  }
  EXPECT_THAT(order, ElementsAre("a0", "b0", "c0", "a1", "d0"));
}

TEST(FusionTest, ANameDoesNotOvertakeItself) {
  Coordinator coordinator(1, 100);
  SubmitOnAll(&coordinator, 1, Allreduce("first", 10));
  SubmitOnAll(&coordinator, 1, Allreduce("again", 20));
  // Would fit beside "first", but the larger request of its name waits before it.
  SubmitOnAll(&coordinator, 1, Allreduce("again", 5));
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_THAT(Names(decisions[0]), ElementsAre("first"));
  EXPECT_THAT(Names(decisions[1]), ElementsAre("again", "again"));
}

TEST(FusionTest, NothingOvertakesAFailureOfItsName) {
  Coordinator coordinator(2, kFusionBytes);
  SubmitOnAll(&coordinator, 2, Allreduce("a"));
  coordinator.Submit(0, Share(Allreduce("b", 1)), 0);
  coordinator.Submit(1, Share(Allreduce("b", 2)), 0);
  SubmitOnAll(&coordinator, 2, Allreduce("b"));
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 3u);
  EXPECT_THAT(Names(decisions[0]), ElementsAre("a"));
  EXPECT_EQ(decisions[1].type, Decision::Type::kFail);
  EXPECT_THAT(Names(decisions[2]), ElementsAre("b"));
}

// ---- Mismatches

std::string MismatchText(const Description& rank0, const Description& rank1) {
  Coordinator coordinator(2, kFusionBytes);
  coordinator.Submit(0, Share(rank0), 0);
  coordinator.Submit(1, Share(rank1), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  EXPECT_EQ(decisions.size(), 1u);
  if (decisions.size() != 1) return "";
  EXPECT_EQ(decisions[0].type, Decision::Type::kFail);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(0, 1));
  EXPECT_FALSE(decisions[0].departed);
  return decisions[0].text;
}

TEST(MismatchTest, NamesTheTensorAndWhatEachRankGave) {
  Coordinator coordinator(4, kFusionBytes);
  for (int rank : {0, 1, 3}) coordinator.Submit(rank, Share(Allreduce("grad/w", 3)), 0);
  coordinator.Submit(2, Share(Allreduce("grad/w", 4)), 0);
  std::vector<std::string> texts;
  std::set<int> failed;
  for (const Decision& decision : TakeAll(&coordinator)) {
    EXPECT_EQ(decision.type, Decision::Type::kFail);
    EXPECT_THAT(Names(decision), ElementsAre("grad/w"));
    texts.push_back(decision.text);
    failed.insert(decision.ranks.begin(), decision.ranks.end());
  }
  EXPECT_THAT(failed, ElementsAre(0, 1, 2, 3));
  ASSERT_EQ(texts.size(), 1u);
  EXPECT_EQ(texts[0],
            "'grad/w' differs between ranks (ranks 0, 1, 3: allreduce Sum of "
            "float32[3]; rank 2: allreduce Sum of float32[4]). Every rank must submit "
            "the same under one name");
}

TEST(MismatchTest, OfShapeTypeReductionScaleKindRootAndCount) {
  const Description base = Allreduce("x", 3);
  Description other = base;
  other.tensors[0].shape = {3, 1};
  EXPECT_THAT(MismatchText(base, other), HasSubstr("rank 1: allreduce Sum of "
                                                   "float32[3,1]"));
  other = base;
  other.tensors[0].dtype = DataType::kBfloat16;
  EXPECT_THAT(MismatchText(base, other), HasSubstr("bfloat16[3]"));
  other = base;
  other.reduction.op = ReduceOp::kMax;
  EXPECT_THAT(MismatchText(base, other), HasSubstr("allreduce Max of float32[3]"));
  other = base;
  other.reduction.prescale = 0.5;
  EXPECT_THAT(MismatchText(base, other), HasSubstr("prescale 0.5"));
  other = base;
  other.reduction.postscale = 0.25;
  EXPECT_THAT(MismatchText(base, other), HasSubstr("postscale 0.25"));
  other = base;
  other.tensors.push_back({DataType::kInt8, {}});
  EXPECT_THAT(MismatchText(base, other),
              HasSubstr("rank 1: allreduce Sum of 2 tensors float32[3], int8[]"));
  EXPECT_THAT(MismatchText(base, Broadcast("x")),
              HasSubstr("rank 1: broadcast of float32[10] from root 0"));
  EXPECT_THAT(MismatchText(Broadcast("x", 1), Broadcast("x", 0)),
              HasSubstr("rank 0: broadcast of float32[10] from root 1; rank 1: "
                        "broadcast of float32[10] from root 0"));
}

TEST(MismatchTest, AnAllgathersRowsMayDifferButNotItsRowShape) {
  Description gather = Allreduce("x");
  gather.kind = Kind::kAllgather;
  gather.tensors[0].shape = {-1, 3};
  Coordinator coordinator(2, kFusionBytes);
  SubmitOnAll(&coordinator, 2, gather);
  ASSERT_EQ(TakeAll(&coordinator).size(), 1u);
  Description other = gather;
  other.tensors[0].shape = {-1, 4};
  EXPECT_THAT(MismatchText(gather, other),
              HasSubstr("rank 0: allgather of float32[any,3]; rank 1: allgather of "
                        "float32[any,4]"));
}

TEST(MismatchTest, ALateRankMeetsTheFailureThatItIsOwed) {
  Coordinator coordinator(3, kFusionBytes);
  coordinator.Submit(0, Share(Allreduce("x", 1)), 0);
  coordinator.Submit(1, Share(Allreduce("x", 2)), 0);
  std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(0, 1));
  const std::string text = decisions[0].text;

  // The others go on to the next request of the name before rank 2 comes to the first.
  coordinator.Submit(0, Share(Allreduce("x", 5)), 0);
  coordinator.Submit(1, Share(Allreduce("x", 5)), 0);
  coordinator.Submit(2, Share(Allreduce("x", 1)), 0);
  decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kFail);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(2));
  EXPECT_EQ(decisions[0].text, text);

  coordinator.Submit(2, Share(Allreduce("x", 5)), 0);
  decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
}

TEST(DuplicateTest, FailsOnAllRanksAndLeavesTheFirstAlone) {
  Coordinator coordinator(2, kFusionBytes);
  coordinator.Submit(0, Share(Allreduce("x")), 0);
  coordinator.Submit(0, Share(Allreduce("x")), 0, /*duplicate=*/true);
  EXPECT_THAT(TakeAll(&coordinator), IsEmpty());
  coordinator.Submit(1, Share(Allreduce("x")), 0);
  std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
  EXPECT_EQ(decisions[1].type, Decision::Type::kFail);
  EXPECT_THAT(decisions[1].ranks, ElementsAre(0));
  EXPECT_THAT(decisions[1].text,
              HasSubstr("allreduce 'x' was submitted on rank 0 by a second op while "
                        "the first was under way"));
  coordinator.Submit(1, Share(Allreduce("x")), 0);
  decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(1));
  EXPECT_THAT(decisions[0].text, HasSubstr("submitted on rank 0 by a second op"));
}

TEST(QueueTest, TheSameOpsRequestsOfOneNameAreServedInOrder) {
  Coordinator coordinator(2, 0);
  for (int64_t floats : {1, 2, 3}) {
    coordinator.Submit(0, Share(Allreduce("x", floats)), 0);
  }
  for (int64_t floats : {1, 2, 3}) {
    coordinator.Submit(1, Share(Allreduce("x", floats)), 0);
    const std::vector<Decision> decisions = TakeAll(&coordinator);
    ASSERT_EQ(decisions.size(), 1u);
    // Were they not paired in order, sizes would differ.
    EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
  }
}

// ---- Process sets

TEST(ProcessSetTest, OnlyItsMembersAreWaitedFor) {
  Coordinator coordinator(4, kFusionBytes);
  coordinator.AddProcessSet(7, {1, 3});
  coordinator.Submit(3, Share(Allreduce("x", 10, ReduceOp::kSum, 7)), 0);
  coordinator.Submit(1, Share(Allreduce("x", 10, ReduceOp::kSum, 7)), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(1, 3));
  EXPECT_EQ(decisions[0].tensors[0].process_set, 7);
}

TEST(ProcessSetTest, OneNameInTwoSetsIsTwoRequests) {
  Coordinator coordinator(2, kFusionBytes);
  coordinator.AddProcessSet(1, {0, 1});
  coordinator.Submit(0, Share(Allreduce("x", 1, ReduceOp::kSum, 0)), 0);
  coordinator.Submit(1, Share(Allreduce("x", 2, ReduceOp::kSum, 1)), 0);
  EXPECT_THAT(TakeAll(&coordinator), IsEmpty());
}

TEST(ProcessSetTest, ARankThatIsNoMemberFailsAtOnceAndAlone) {
  Coordinator coordinator(3, kFusionBytes);
  coordinator.AddProcessSet(1, {0, 2});
  for (int32_t set : {1, 9}) {
    coordinator.Submit(1, Share(Allreduce("x", 1, ReduceOp::kSum, set)), 0);
    const std::vector<Decision> decisions = TakeAll(&coordinator);
    ASSERT_EQ(decisions.size(), 1u);
    EXPECT_EQ(decisions[0].type, Decision::Type::kFail);
    EXPECT_THAT(decisions[0].ranks, ElementsAre(1));
    EXPECT_EQ(decisions[0].text, set == 1 ? "rank 1 is not in process set 1"
                                          : "there is no process set 9 any more");
  }
}

Description AddSet(std::vector<int> members) {
  Description description;
  description.kind = Kind::kAddProcessSet;
  description.name = "sets";
  description.members = std::move(members);
  return description;
}

Description RemoveSet(std::vector<int> members) {
  Description description = AddSet(std::move(members));
  description.kind = Kind::kRemoveProcessSet;
  return description;
}

// The only decision that follows from all ranks' asking for something.
Decision AllAsk(Coordinator* coordinator, int size, const Description& description) {
  SubmitOnAll(coordinator, size, description);
  const std::vector<Decision> decisions = TakeAll(coordinator);
  EXPECT_EQ(decisions.size(), 1u);
  return decisions.empty() ? Decision() : decisions.back();
}

TEST(AgreementTest, SetsGetNumbersOnceAllRanksHaveAskedForThem) {
  Coordinator coordinator(3, kFusionBytes);
  coordinator.Submit(0, Share(AddSet({0, 2})), 0);
  coordinator.Submit(2, Share(AddSet({0, 2})), 0);
  EXPECT_THAT(TakeAll(&coordinator), IsEmpty());
  coordinator.Submit(1, Share(AddSet({0, 2})), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kAgree);
  EXPECT_EQ(decisions[0].agreed, Kind::kAddProcessSet);
  EXPECT_EQ(decisions[0].answer, 1);
  EXPECT_THAT(decisions[0].members, ElementsAre(0, 2));
  EXPECT_THAT(decisions[0].ranks, ElementsAre(0, 1, 2));
  EXPECT_EQ(AllAsk(&coordinator, 3, AddSet({1})).answer, 2);
  coordinator.Submit(1, Share(Allreduce("x", 1, ReduceOp::kSum, 2)), 0);
  EXPECT_THAT(TakeAll(&coordinator)[0].ranks, ElementsAre(1));
}

TEST(AgreementTest, TheNumberOfARemovedSetIsNotGivenAgain) {
  Coordinator coordinator(2, kFusionBytes);
  EXPECT_EQ(AllAsk(&coordinator, 2, AddSet({1})).answer, 1);
  const Decision removed = AllAsk(&coordinator, 2, RemoveSet({1}));
  EXPECT_EQ(removed.type, Decision::Type::kAgree);
  EXPECT_EQ(removed.agreed, Kind::kRemoveProcessSet);
  EXPECT_EQ(removed.answer, 1);
  coordinator.Submit(1, Share(Allreduce("x", 1, ReduceOp::kSum, 1)), 0);
  EXPECT_EQ(TakeAll(&coordinator)[0].text, "there is no process set 1 any more");
  EXPECT_EQ(AllAsk(&coordinator, 2, AddSet({1})).answer, 2);
}

TEST(AgreementTest, DifferentSetsAreAnErrorThatNamesWhatEachRankGave) {
  Coordinator coordinator(3, kFusionBytes);
  coordinator.Submit(0, Share(AddSet({0, 1})), 0);
  coordinator.Submit(1, Share(AddSet({0, 2})), 0);
  coordinator.Submit(2, Share(RemoveSet({0, 1})), 0);
  std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kFail);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(0, 1));
  EXPECT_EQ(decisions[0].text,
            "the ranks' calls differ (rank 0: add_process_set of ranks 0, 1; rank 1: "
            "add_process_set of ranks 0, 2). Every rank must add and remove the same "
            "process sets in the same order");
  EXPECT_THAT(decisions[1].ranks, ElementsAre(2));
  EXPECT_EQ(AllAsk(&coordinator, 3, AddSet({0, 1})).answer, 1);
}

TEST(AgreementTest, NoTwoSetsHaveTheSameRanks) {
  Coordinator coordinator(2, kFusionBytes);
  EXPECT_EQ(AllAsk(&coordinator, 2, AddSet({0})).answer, 1);
  const Decision again = AllAsk(&coordinator, 2, AddSet({0}));
  EXPECT_EQ(again.type, Decision::Type::kFail);
  EXPECT_THAT(again.ranks, ElementsAre(0, 1));
  EXPECT_THAT(again.text, HasSubstr("rank 0 are process set 1 already"));
  EXPECT_THAT(AllAsk(&coordinator, 2, AddSet({0, 1})).text,
              HasSubstr("ranks 0, 1 are process set 0 already"));
}

TEST(AgreementTest, ASetIsRemovedOnlyWhenNothingOfItWaits) {
  Coordinator coordinator(2, 0);
  EXPECT_EQ(AllAsk(&coordinator, 2, RemoveSet({1})).text,
            "there is no process set of rank 1 that could be removed");
  EXPECT_EQ(AllAsk(&coordinator, 2, RemoveSet({0, 1})).type, Decision::Type::kFail);
  coordinator.AddProcessSet(3, {0, 1});
  coordinator.AddProcessSet(4, {1});
  const Shared x = Share(Allreduce("x", 1, ReduceOp::kSum, 3));
  const Shared alone = Share(Allreduce("x", 1, ReduceOp::kSum, 4));
  coordinator.Submit(1, alone, 0);
  coordinator.Submit(0, x, 0);
  SubmitOnAll(&coordinator, 2, RemoveSet({1}));
  coordinator.Submit(1, x, 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 3u);
  // What was settled before is handed out before, with its set's ranks.
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(1));
  EXPECT_EQ(decisions[1].type, Decision::Type::kAgree);
  EXPECT_EQ(decisions[1].answer, 4);
  EXPECT_EQ(decisions[2].type, Decision::Type::kRun);

  coordinator.AddProcessSet(5, {1});
  coordinator.AddProcessSet(6, {0});
  coordinator.Submit(1, Share(Allreduce("y", 1, ReduceOp::kSum, 3)), 0);
  const Decision removed = AllAsk(&coordinator, 2, RemoveSet({0}));
  EXPECT_EQ(removed.answer, 6);
}

TEST(AgreementTest, ASetInUseIsNotRemoved) {
  Coordinator coordinator(3, kFusionBytes);
  coordinator.AddProcessSet(1, {0, 2});
  coordinator.Submit(2, Share(Allreduce("x", 1, ReduceOp::kSum, 1)), 0);
  const Decision refused = AllAsk(&coordinator, 3, RemoveSet({0, 2}));
  EXPECT_EQ(refused.type, Decision::Type::kFail);
  EXPECT_EQ(refused.text, "process set 1 is in use: allreduce 'x' waits on rank 2");
  coordinator.Submit(0, Share(Allreduce("x", 1, ReduceOp::kSum, 1)), 0);
  EXPECT_EQ(TakeAll(&coordinator).at(0).type, Decision::Type::kRun);
  EXPECT_EQ(AllAsk(&coordinator, 3, RemoveSet({0, 2})).type, Decision::Type::kAgree);
}

TEST(AgreementTest, FailsWhenARankHasLeft) {
  Coordinator coordinator(2, kFusionBytes);
  coordinator.Submit(0, Share(AddSet({0})), 0);
  coordinator.Leave(1, "rank 1 left");
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_TRUE(decisions[0].departed);
  EXPECT_EQ(decisions[0].text, "add_process_set() cannot be completed: rank 1 left");
}

// ---- Joins

Description Join() {
  Description description;
  description.kind = Kind::kJoin;
  description.name = "join";
  return description;
}

TEST(JoinTest, EndsWithTheLastRankThatJoined) {
  Coordinator coordinator(3, kFusionBytes);
  for (int time = 0; time < 2; ++time) {
    for (int rank : {2, 0}) coordinator.Submit(rank, Share(Join()), 0);
    EXPECT_THAT(TakeAll(&coordinator), IsEmpty());
    coordinator.Submit(1, Share(Join()), 0);
    const std::vector<Decision> decisions = TakeAll(&coordinator);
    ASSERT_EQ(decisions.size(), 1u);
    EXPECT_EQ(decisions[0].type, Decision::Type::kAgree);
    EXPECT_EQ(decisions[0].agreed, Kind::kJoin);
    EXPECT_EQ(decisions[0].answer, 1);
    EXPECT_THAT(decisions[0].ranks, ElementsAre(0, 1, 2));
  }
}

TEST(JoinTest, SumsAndAveragesGoOnWithZeros) {
  Coordinator coordinator(3, kFusionBytes);
  coordinator.Submit(0, Share(Allreduce("before")), 0);
  coordinator.Submit(1, Share(Allreduce("both")), 0);
  coordinator.Submit(1, Share(Join()), 0);
  coordinator.Submit(2, Share(Allreduce("before")), 0);
  coordinator.Submit(2, Share(Allreduce("both")), 0);
  coordinator.Submit(0, Share(Allreduce("both")), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(0, 1, 2));
  EXPECT_THAT(Names(decisions[0]), ElementsAre("before", "both"));
  // Rank 1 had submitted the other one before it joined.
  ASSERT_EQ(decisions[0].zeros.size(), 1u);
  EXPECT_THAT(decisions[0].zeros[0].ranks, ElementsAre(1));
  EXPECT_EQ(decisions[0].zeros[0].description->name, "before");
  EXPECT_TRUE(decisions[0].zeros[0].description->Matches(Allreduce("before")));

  const Description average = Allreduce("average", 1, ReduceOp::kAverage);
  for (int rank : {2, 0}) coordinator.Submit(rank, Share(average), 0);
  ASSERT_EQ(TakeAll(&coordinator).at(0).zeros.size(), 1u);
}

TEST(JoinTest, WhatWaitsForTheRankRunsWhenItJoins) {
  Coordinator coordinator(2, 0);
  coordinator.Submit(0, Share(Allreduce("x")), 0);
  coordinator.Submit(0, Share(Allreduce("x", 7)), 0);
  coordinator.Submit(1, Share(Join()), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_EQ(decisions[0].zeros.at(0).description->bytes(), 40);
  EXPECT_EQ(decisions[1].zeros.at(0).description->bytes(), 28);
}

TEST(JoinTest, AfterItEveryRankIsWaitedForAgain) {
  Coordinator coordinator(2, 0);
  coordinator.Submit(0, Share(Join()), 0);
  coordinator.Submit(1, Share(Join()), 0);
  EXPECT_EQ(TakeAll(&coordinator).size(), 1u);
  coordinator.Submit(0, Share(Allreduce("x")), 0);
  EXPECT_THAT(TakeAll(&coordinator), IsEmpty());
  coordinator.Submit(1, Share(Allreduce("x")), 0);
  EXPECT_THAT(TakeAll(&coordinator).at(0).zeros, IsEmpty());
}

TEST(JoinTest, WhatZerosWouldMakeWrongFailsOnThoseThatWait) {
  std::vector<Description> wrong = {Allreduce("x", 1, ReduceOp::kMin),
                                    Allreduce("x", 1, ReduceOp::kMax),
                                    Allreduce("x", 1, ReduceOp::kProduct),
                                    Broadcast("x"),
                                    Barrier("x"),
                                    Allreduce("x", 1, ReduceOp::kSum, 1),
                                    AddSet({0})};
  Description gather = Allreduce("x");
  gather.kind = Kind::kAllgather;
  wrong.push_back(gather);
  for (const Description& description : wrong) {
    for (const bool joins_first : {false, true}) {
      SCOPED_TRACE(Details(description));
      Coordinator coordinator(3, 0);
      coordinator.AddProcessSet(1, {0, 2});
      if (joins_first) coordinator.Submit(2, Share(Join()), 0);
      coordinator.Submit(0, Share(description), 0);
      if (!joins_first) coordinator.Submit(2, Share(Join()), 0);
      std::vector<Decision> decisions = TakeAll(&coordinator);
      ASSERT_EQ(decisions.size(), 1u);
      EXPECT_EQ(decisions[0].type, Decision::Type::kFail);
      EXPECT_FALSE(decisions[0].departed);
      EXPECT_THAT(decisions[0].ranks, ElementsAre(0));
      EXPECT_THAT(decisions[0].text, HasSubstr("rank 2 has joined"));
      EXPECT_THAT(decisions[0].text, HasSubstr(Details(description)));
      // Nobody is owed anything.
      coordinator.Submit(1, Share(Join()), 0);
      coordinator.Submit(0, Share(Join()), 0);
      EXPECT_EQ(TakeAll(&coordinator).at(0).answer, 0);
      if (description.process_set == 0) {
        SubmitOnAll(&coordinator, 3, description);
        EXPECT_NE(TakeAll(&coordinator).at(0).type, Decision::Type::kFail);
      }
    }
  }
}

// One goes on to a sum of the same name before another has come to what failed.
TEST(JoinTest, EachOfTheOthersMeetsTheFailureOnce) {
  Coordinator coordinator(3, 0);
  const Shared wrong = Share(Allreduce("x", 1, ReduceOp::kMax));
  const Shared sum = Share(Allreduce("x"));
  coordinator.Submit(0, Share(Join()), 0);
  coordinator.Submit(1, wrong, 0);
  coordinator.Submit(1, sum, 0);
  coordinator.Submit(2, wrong, 0);
  coordinator.Submit(2, sum, 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 3u);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(1));
  EXPECT_THAT(decisions[1].ranks, ElementsAre(2));
  EXPECT_EQ(decisions[0].text, decisions[1].text);
  EXPECT_EQ(decisions[2].type, Decision::Type::kRun);
  EXPECT_EQ(decisions[2].zeros.size(), 1u);
}

TEST(JoinTest, SetsWithoutTheRankGoOn) {
  Coordinator coordinator(3, 0);
  coordinator.AddProcessSet(1, {0, 1});
  coordinator.Submit(2, Share(Join()), 0);
  for (int rank : {0, 1}) {
    coordinator.Submit(rank, Share(Allreduce("x", 1, ReduceOp::kMin, 1)), 0);
  }
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
  EXPECT_THAT(decisions[0].zeros, IsEmpty());
}

TEST(JoinTest, AMistakeOfTheOthersIsTheirs) {
  Coordinator coordinator(4, 0);
  coordinator.Submit(3, Share(Join()), 0);
  coordinator.Submit(0, Share(Allreduce("x", 1)), 0);
  coordinator.Submit(1, Share(Allreduce("x", 2)), 0);
  EXPECT_THAT(TakeAll(&coordinator).at(0).ranks, ElementsAre(0, 1));
  coordinator.Submit(2, Share(Join()), 0);  // it will not come to the name any more
  for (int rank : {0, 1}) coordinator.Submit(rank, Share(Join()), 0);
  EXPECT_EQ(TakeAll(&coordinator).at(0).answer, 1);
  SubmitOnAll(&coordinator, 4, Allreduce("x", 3));
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
}

TEST(JoinTest, FailsWhenARankLeavesJoinedOrNot) {
  for (const bool joined : {false, true}) {
    Coordinator coordinator(3, 0);
    coordinator.Submit(0, Share(Join()), 0);
    if (joined) coordinator.Submit(2, Share(Join()), 0);
    coordinator.Leave(2, "rank 2 left");
    const std::vector<Decision> decisions = TakeAll(&coordinator);
    ASSERT_EQ(decisions.size(), 1u);
    EXPECT_TRUE(decisions[0].departed);
    EXPECT_THAT(decisions[0].ranks, ElementsAre(0));
    EXPECT_EQ(decisions[0].text, "join() cannot be completed: rank 2 left");
    coordinator.Submit(1, Share(Allreduce("x")), 0);
    EXPECT_TRUE(TakeAll(&coordinator).at(0).departed);
  }
}

TEST(JoinTest, IsNoStallWhileOthersGoOnAndJoinedRanksAreNotMissing) {
  Coordinator coordinator(3, 0);
  coordinator.Submit(2, Share(Join()), 10);
  coordinator.Submit(0, Share(Allreduce("x")), 90);
  const std::vector<Stall> stalls = coordinator.Stalls();
  ASSERT_EQ(stalls.size(), 2u);
  EXPECT_EQ(stalls[0].kind, Kind::kJoin);
  EXPECT_EQ(stalls[0].since, 90);
  EXPECT_THAT(stalls[0].missing, ElementsAre(0, 1));
  EXPECT_EQ(stalls[1].since, 90);
  EXPECT_THAT(stalls[1].waiting, ElementsAre(0));
  EXPECT_THAT(stalls[1].missing, ElementsAre(1));
}

// ---- Departures

TEST(DepartureTest, EndsWhatWaitsForTheRankAndSaysHowItLeft) {
  Coordinator coordinator(3, kFusionBytes);
  coordinator.Submit(0, Share(Allreduce("x")), 0);
  coordinator.Leave(2, "rank 2 went home");
  std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kFail);
  EXPECT_TRUE(decisions[0].departed);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(0));
  EXPECT_EQ(decisions[0].text, "'x' cannot be completed: rank 2 went home");

  coordinator.Submit(1, Share(Allreduce("x")), 0);
  decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_TRUE(decisions[0].departed);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(1));
}

TEST(DepartureTest, TheRankThatLeftFirstIsNamed) {
  Coordinator coordinator(3, kFusionBytes);
  coordinator.Leave(2, "rank 2 went home");
  coordinator.Leave(0, "rank 0 went home");
  coordinator.Submit(1, Share(Allreduce("x")), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].text, "'x' cannot be completed: rank 2 went home");
}

TEST(DepartureTest, WhatTheRankStillHadWaitingIsNotRunWithoutIt) {
  Coordinator coordinator(2, kFusionBytes);
  coordinator.Submit(1, Share(Allreduce("x")), 0);
  coordinator.Leave(1, "rank 1 went home");
  EXPECT_THAT(TakeAll(&coordinator), IsEmpty());
  EXPECT_THAT(coordinator.Stalls(), IsEmpty());
  coordinator.Submit(0, Share(Allreduce("x")), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kFail);
  EXPECT_TRUE(decisions[0].departed);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(0));
}

TEST(DepartureTest, DoesNotConcernSetsThatTheRankIsNotIn) {
  Coordinator coordinator(3, kFusionBytes);
  coordinator.AddProcessSet(1, {0, 1});
  coordinator.Submit(0, Share(Allreduce("x", 1, ReduceOp::kSum, 1)), 0);
  coordinator.Leave(2, "rank 2 went home");
  EXPECT_THAT(TakeAll(&coordinator), IsEmpty());
  coordinator.Submit(1, Share(Allreduce("x", 1, ReduceOp::kSum, 1)), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
}

// ---- Stalls and memory

TEST(StallTest, ListsWhoWaitsAndWhoIsMissingTheOldestFirst) {
  Coordinator coordinator(3, kFusionBytes);
  coordinator.Submit(2, Share(Broadcast("late")), 20);
  coordinator.Submit(0, Share(Allreduce("done")), 21);
  coordinator.Submit(0, Share(Allreduce("later")), 22);
  coordinator.Submit(0, Share(Broadcast("late")), 23);
  coordinator.Submit(1, Share(Allreduce("done")), 24);
  coordinator.Submit(2, Share(Allreduce("done")), 25);
  const std::vector<Stall> stalls = coordinator.Stalls();
  ASSERT_EQ(stalls.size(), 2u);
  EXPECT_EQ(stalls[0].key.name, "late");
  EXPECT_EQ(stalls[0].kind, Kind::kBroadcast);
  EXPECT_EQ(stalls[0].since, 20);
  EXPECT_THAT(stalls[0].waiting, ElementsAre(0, 2));
  EXPECT_THAT(stalls[0].missing, ElementsAre(1));
  EXPECT_EQ(stalls[1].key.name, "later");
  EXPECT_THAT(stalls[1].waiting, ElementsAre(0));
  EXPECT_THAT(stalls[1].missing, ElementsAre(1, 2));
  EXPECT_EQ(coordinator.LastSubmission(0), "broadcast 'late'");
  EXPECT_EQ(coordinator.LastSubmission(1), "allreduce 'done'");
}

TEST(StallTest, ARequestBehindAnotherOfItsNameCountsFromItsOwnTime) {
  Coordinator coordinator(2, kFusionBytes);
  coordinator.Submit(0, Share(Allreduce("x")), 10);
  coordinator.Submit(0, Share(Allreduce("x")), 50);
  coordinator.Submit(1, Share(Allreduce("x")), 60);
  ASSERT_EQ(coordinator.Stalls().size(), 1u);
  EXPECT_EQ(coordinator.Stalls()[0].since, 50);
}

TEST(MemoryTest, IdleNamesAreForgottenAndOthersAreNot) {
  Coordinator coordinator(2, kFusionBytes);
  coordinator.Submit(0, Share(Allreduce("waits")), 0);
  coordinator.Submit(0, Share(Allreduce("owed", 1)), 0);
  coordinator.AddProcessSet(1, {0, 1});
  Description owed = Allreduce("owed", 1, ReduceOp::kSum, 1);
  coordinator.Submit(0, Share(owed), 0);
  coordinator.Submit(0, Share(owed), 0, /*duplicate=*/true);
  coordinator.Submit(1, Share(owed), 0);
  TakeAll(&coordinator);  // the duplicate failed on rank 0; rank 1 is owed that

  const auto use_names = [&](int from, int to) {
    for (int i = from; i < to; ++i) {
      SubmitOnAll(&coordinator, 2, Allreduce("name" + std::to_string(i)));
      ASSERT_EQ(TakeAll(&coordinator).size(), 1u);
    }
  };
  use_names(0, 20000);
  const size_t before = mallinfo2().uordblks;
  use_names(20000, 100000);
  // 80,000 names that were kept would take 200 MB. (A sanitizer's allocator says 0.)
  EXPECT_LT(mallinfo2().uordblks, before + (32 << 20));

  coordinator.Submit(1, Share(Allreduce("waits")), 0);
  coordinator.Submit(1, Share(owed), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
  EXPECT_EQ(decisions[1].type, Decision::Type::kFail);
  EXPECT_THAT(decisions[1].ranks, ElementsAre(1));
}

// ---- Random schedules

// A job of random size, sets, names and mistakes, whose messages travel with random
// delays: each rank's submissions to the coordinator in order, the decisions to each
// rank in order, nothing else in any order. Every decision is checked against what the
// ranks have really submitted.
class Simulation {
 public:
  explicit Simulation(uint64_t seed) : random_(seed) {
    size_ = 1 + Random(6);
    fusion_bytes_ = Random(3) == 0 ? 0 : 64 << Random(6);
    coordinator_ = std::make_unique<Coordinator>(size_, fusion_bytes_);
    ranks_.resize(size_);
    MakeProcessSets();
    MakePrograms();
  }

  void Run() {
    while (!HasFatalFailure() && Step()) {
    }
    if (!HasFatalFailure()) CheckEnd();
  }

  int64_t completed() const { return completed_; }
  int64_t fused() const { return fused_; }
  int64_t failed() const { return failed_; }
  int64_t broken_off() const { return job_failed_; }

 private:
  using Key = std::pair<int32_t, std::string>;

  // The requests of one name, in order; `ranks` says what each member gives.
  struct Given {
    Shared description;
    bool duplicate = false;
  };
  struct Turn {
    std::map<int, Given> given;
    std::set<int> arrived;  // members whose submission the coordinator has seen
  };
  struct Request {
    Key key;
    size_t turn;
  };
  struct Rank {
    std::vector<Request> program;
    size_t submitted = 0;                // how much of the program
    size_t leaves_after = SIZE_MAX;      // submissions
    bool left = false;                   // the rank itself
    bool known_left = false;             // the coordinator knows
    std::deque<Request> to_coordinator;  // on their way
    std::deque<size_t> decisions;        // on their way, by number
    std::map<Key, std::deque<size_t>> pending;
    std::map<std::pair<Key, size_t>, int> ended;
    std::vector<size_t> batches;  // executed, by number
    bool in_batch = false;
  };
  struct Issued {
    Decision decision;
    std::map<std::string, std::vector<size_t>> turns;
    std::vector<std::pair<Key, size_t>> requests;  // once a member has begun it
    std::set<int> begun;
  };

  static bool HasFatalFailure() { return ::testing::Test::HasFatalFailure(); }
  int64_t Random(int64_t below) { return random_() % below; }
  bool Chance(int percent) { return Random(100) < percent; }

  void MakeProcessSets() {
    sets_[0].resize(size_);
    for (int rank = 0; rank < size_; ++rank) sets_[0][rank] = rank;
    const int count = Random(4);
    for (int id = 1; id <= count; ++id) {
      std::vector<int> members;
      for (int rank = 0; rank < size_; ++rank) {
        if (Chance(50)) members.push_back(rank);
      }
      if (!members.empty()) sets_[id * 3] = members;
    }
    // Disjoint halves as well.
    if (size_ > 1 && Chance(50)) {
      const int cut = 1 + Random(size_ - 1);
      sets_[100].assign(sets_[0].begin(), sets_[0].begin() + cut);
      sets_[101].assign(sets_[0].begin() + cut, sets_[0].end());
    }
    for (const auto& [id, members] : sets_) {
      if (id != 0) coordinator_->AddProcessSet(id, members);
    }
  }

  Description RandomDescription(int32_t set, const std::string& name) {
    Description description = Allreduce(name, 1 + Random(40), ReduceOp::kSum, set);
    if (Chance(20)) description.reduction.op = ReduceOp::kAverage;
    if (Chance(10)) description.reduction.postscale = 0.5;
    if (Chance(30)) description.tensors[0].dtype = DataType::kFloat64;
    if (Chance(10)) description.tensors.push_back({DataType::kInt8, {3}});
    if (Chance(25)) {
      description.kind = static_cast<Kind>(1 + Random(3));
      description.reduction = {};
      description.tensors.resize(1);
      if (description.kind == Kind::kBarrier) description.tensors.clear();
      if (description.kind == Kind::kBroadcast) description.root = sets_[set].back();
    }
    return description;
  }

  void MakePrograms() {
    const int mistakes = Random(2) == 0 ? 0 : 5;
    const bool same_order = Chance(25);
    const int names = 1 + Random(6);
    const int requests = 1 + Random(60);
    for (int i = 0; i < requests; ++i) {
      const auto set = std::next(sets_.begin(), Random(sets_.size()));
      const Key key = {set->first, "n" + std::to_string(Random(names))};
      const Shared description = Share(RandomDescription(key.first, key.second));
      Turn turn;
      for (int rank : set->second) {
        Given given = {description, Chance(mistakes)};
        if (Chance(mistakes)) {
          given.description = Share(RandomDescription(key.first, key.second));
        } else if (Chance(50)) {
          given.description = Share(*description);  // equal, but another object
        }
        turn.given[rank] = given;
        ranks_[rank].program.push_back({key, turns_[key].size()});
      }
      turns_[key].push_back(std::move(turn));
    }
    for (Rank& rank : ranks_) {
      if (!same_order) Shuffle(&rank.program);
      // Some never come to the end of their program, some leave before it.
      if (Chance(mistakes)) rank.program.resize(Random(rank.program.size() + 1));
      if (Chance(3 * mistakes)) rank.leaves_after = Random(rank.program.size() + 1);
    }
  }

  // A random order, but for the turns of one name.
  void Shuffle(std::vector<Request>* program) {
    std::shuffle(program->begin(), program->end(), random_);
    std::map<Key, size_t> turns;
    for (Request& request : *program) request.turn = turns[request.key]++;
  }

  // Lets something that can happen happen; false if nothing can.
  bool Step() {
    std::vector<std::pair<int, int>> possible;
    for (int r = 0; r < size_; ++r) {
      const Rank& rank = ranks_[r];
      // As the engine, a rank does not leave in the middle of a collective.
      const bool leaves = rank.submitted == rank.leaves_after && !rank.in_batch;
      const bool submits =
          leaves || rank.submitted < std::min(rank.program.size(), rank.leaves_after);
      if (!rank.left && submits) possible.emplace_back(0, r);
      const bool tells = !rank.to_coordinator.empty() || rank.left != rank.known_left;
      if (tells) possible.emplace_back(1, r);
      if (!rank.left && !rank.decisions.empty() && CanExecute(r)) {
        possible.emplace_back(2, r);
      }
    }
    if (job_failed_ || possible.empty()) return false;
    const auto [what, rank] = possible[Random(possible.size())];
    if (what == 0) SubmitOrLeave(rank);
    if (what == 1) TellCoordinator(rank);
    if (what == 2) Execute(rank);
    return true;
  }

  void SubmitOrLeave(int r) {
    Rank& rank = ranks_[r];
    if (rank.submitted == rank.leaves_after) {
      rank.left = true;
      rank.decisions.clear();
      for (const auto& [key, turns] : rank.pending) {
        for (size_t turn : turns) rank.ended[{key, turn}] += 1;
      }
      rank.pending.clear();
      return;
    }
    const Request request = rank.program[rank.submitted++];
    rank.pending[request.key].push_back(request.turn);
    rank.to_coordinator.push_back(request);
  }

  void TellCoordinator(int r) {
    Rank& rank = ranks_[r];
    now_ += 1;
    if (rank.to_coordinator.empty()) {
      rank.known_left = true;
      coordinator_->Leave(r, "rank " + std::to_string(r) + " left");
    } else {
      const Request request = rank.to_coordinator.front();
      rank.to_coordinator.pop_front();
      Turn& turn = turns_[request.key][request.turn];
      turn.arrived.insert(r);
      const Given& given = turn.given.at(r);
      coordinator_->Submit(r, given.description, now_, given.duplicate);
    }
    // Sometimes more comes in before decisions are taken, so that some can be fused.
    // Not around a departure, so that what must not run any more is known.
    const bool somebody_leaves =
        std::any_of(ranks_.begin(), ranks_.end(),
                    [](const Rank& rank) { return rank.leaves_after != SIZE_MAX; });
    if (somebody_leaves || Chance(40)) TakeDecisions();
  }

  void TakeDecisions() {
    Decision decision;
    while (!HasFatalFailure() && coordinator_->Next(&decision)) {
      CheckDecision(decision);
      const size_t number = issued_.size();
      issued_.push_back({decision, {}, {}, {}});
      for (Rank& rank : ranks_) {
        if (!rank.left) rank.decisions.push_back(number);
      }
    }
  }

  void CheckDecision(const Decision& decision) {
    ASSERT_FALSE(decision.tensors.empty());
    const int32_t set = decision.tensors[0].process_set;
    if (decision.type == Decision::Type::kFail) {
      ASSERT_EQ(decision.tensors.size(), 1u);
      ASSERT_FALSE(decision.ranks.empty());
      ASSERT_NE(decision.text, "");
      return;
    }
    ASSERT_EQ(decision.ranks, sets_.at(set));
    for (int rank : decision.ranks) ASSERT_FALSE(ranks_[rank].known_left);
    int64_t bytes = 0;
    const Description* first = nullptr;
    std::map<Key, size_t> next = decided_;
    for (const TensorKey& tensor : decision.tensors) {
      ASSERT_EQ(tensor.process_set, set);
      const Key key = {tensor.process_set, tensor.name};
      // The turn follows from the decisions: those of one name end in order, and a
      // decision to run ends one on every member.
      const size_t turn = NextTurnOfAll(key, &next);
      ASSERT_LT(turn, turns_[key].size());
      const Turn& taken = turns_[key][turn];
      ASSERT_EQ(taken.arrived.size(), taken.given.size());
      ASSERT_EQ(WhatIsWrong(taken), false);
      const Description& description = *taken.given.begin()->second.description;
      bytes += description.bytes();
      if (first == nullptr) first = &description;
      if (decision.tensors.size() == 1) break;
      ASSERT_EQ(description.kind, Kind::kAllreduce);
      ASSERT_TRUE(description.reduction == first->reduction);
      fused_ += 1;
    }
    if (decision.tensors.size() > 1) {
      ASSERT_LE(bytes, fusion_bytes_);
    }
    decided_ = next;
  }

  // The first turn of a name, from `next` on, that is not bound to fail.
  size_t NextTurnOfAll(const Key& key, std::map<Key, size_t>* next) {
    size_t& turn = (*next)[key];
    while (turn < turns_[key].size() && WhatIsWrong(turns_[key][turn])) ++turn;
    return turn++;
  }

  // Whether what the members give in this turn, so far as it has arrived, fits
  // together.
  static bool WhatIsWrong(const Turn& turn) {
    const Description* first = nullptr;
    for (int rank : turn.arrived) {
      const Given& given = turn.given.at(rank);
      if (first == nullptr) first = given.description.get();
      if (given.duplicate || !given.description->Matches(*first)) return true;
    }
    return false;
  }

  // Whether the rank's next decision can be carried out: the end of a collective needs
  // all its members, as the real one's does.
  bool CanExecute(int r) {
    const Rank& rank = ranks_[r];
    if (!rank.in_batch) return true;
    const Issued& issued = issued_[rank.decisions.front()];
    return std::all_of(issued.decision.ranks.begin(), issued.decision.ranks.end(),
                       [&](int member) {
                         return issued.begun.count(member) == 1 || ranks_[member].left;
                       });
  }

  void Execute(int r) {
    Rank& rank = ranks_[r];
    Issued& issued = issued_[rank.decisions.front()];
    const std::vector<int>& concerned = issued.decision.ranks;
    if (std::find(concerned.begin(), concerned.end(), r) == concerned.end()) {
      rank.decisions.pop_front();
      return;
    }
    if (issued.decision.type == Decision::Type::kFail) {
      rank.decisions.pop_front();
      return Fail(r, issued.decision);
    }
    if (!rank.in_batch) return Begin(r, &issued);
    // A member that left in the middle: the engine ends the job.
    if (issued.begun.size() < concerned.size()) {
      job_failed_ = true;
      return;
    }
    rank.batches.push_back(rank.decisions.front());
    rank.decisions.pop_front();
    rank.in_batch = false;
    for (const auto& request : issued.requests) rank.ended[request] += 1;
    completed_ += issued.requests.size();
  }

  void Begin(int r, Issued* issued) {
    std::vector<std::pair<Key, size_t>> requests;
    for (const TensorKey& tensor : issued->decision.tensors) {
      const Key key = {tensor.process_set, tensor.name};
      std::deque<size_t>& pending = ranks_[r].pending[key];
      ASSERT_FALSE(pending.empty()) << "told to run what it has not submitted";
      requests.emplace_back(key, pending.front());
      pending.pop_front();
    }
    // All members run the same requests, not only the same names.
    if (issued->begun.empty()) issued->requests = requests;
    ASSERT_EQ(requests, issued->requests);
    for (const auto& [key, turn] : requests) {
      ASSERT_FALSE(WhatIsWrong(turns_[key][turn]));
    }
    issued->begun.insert(r);
    ranks_[r].in_batch = true;
  }

  void Fail(int r, const Decision& decision) {
    const Key key = {decision.tensors[0].process_set, decision.tensors[0].name};
    std::deque<size_t>& pending = ranks_[r].pending[key];
    ASSERT_FALSE(pending.empty()) << "told to end what it has not submitted";
    const size_t turn = pending.front();
    pending.pop_front();
    ranks_[r].ended[{key, turn}] += 1;
    failed_ += 1;
    if (!decision.departed) {
      ASSERT_TRUE(WhatIsWrong(turns_[key][turn])) << decision.text;
      return;
    }
    const std::vector<int>& members = sets_.at(key.first);
    ASSERT_TRUE(std::any_of(members.begin(), members.end(),
                            [&](int member) { return ranks_[member].known_left; }));
  }

  void CheckEnd() {
    TakeDecisions();
    // Those decisions have to reach the ranks as well.
    while (!HasFatalFailure() && Step()) {
    }
    if (HasFatalFailure()) return;
    CheckOrder();
    for (int r = 0; r < size_; ++r) {
      for (const auto& [request, times] : ranks_[r].ended) ASSERT_EQ(times, 1);
    }
    if (job_failed_) return;
    std::set<std::tuple<Key, int>> waiting;
    for (int r = 0; r < size_; ++r) {
      const Rank& rank = ranks_[r];
      ASSERT_TRUE(rank.left || rank.decisions.empty()) << "rank " << r << " hangs";
      size_t pending = 0;
      for (const auto& [key, turns] : rank.pending) {
        pending += turns.size();
        if (turns.empty()) continue;
        CheckMayWait(key, turns_[key][turns.front()]);
        waiting.emplace(key, r);
      }
      ASSERT_EQ(rank.ended.size() + pending, rank.submitted);
    }
    CheckStalls(waiting);
  }

  // A name's first request may wait for a member that is there and has not submitted
  // it; the others wait behind it.
  void CheckMayWait(const Key& key, const Turn& turn) {
    ASSERT_FALSE(WhatIsWrong(turn));
    const std::vector<int>& members = sets_.at(key.first);
    ASSERT_LT(turn.arrived.size(), members.size());
    for (int member : members) ASSERT_FALSE(ranks_[member].left);
  }

  void CheckStalls(const std::set<std::tuple<Key, int>>& waiting) {
    std::set<std::tuple<Key, int>> listed;
    for (const Stall& stall : coordinator_->Stalls()) {
      for (int rank : stall.waiting) {
        listed.emplace(Key(stall.key.process_set, stall.key.name), rank);
      }
      ASSERT_FALSE(stall.missing.empty());
    }
    ASSERT_EQ(listed, waiting);
  }

  // Any two ranks ran the batches that they share in the same order; a name's requests
  // ran in their order on each.
  void CheckOrder() {
    for (const Rank& a : ranks_) {
      ASSERT_TRUE(std::is_sorted(a.batches.begin(), a.batches.end()));
      std::map<Key, size_t> last;
      for (size_t batch : a.batches) {
        for (const auto& [key, turn] : issued_[batch].requests) {
          ASSERT_GE(turn, last[key]);
          last[key] = turn + 1;
        }
      }
    }
  }

  std::mt19937_64 random_;
  int size_ = 0;
  int64_t fusion_bytes_ = 0;
  std::unique_ptr<Coordinator> coordinator_;
  std::map<int32_t, std::vector<int>> sets_;
  std::map<Key, std::vector<Turn>> turns_;
  std::map<Key, size_t> decided_;  // turns that were decided to run or are past
  std::vector<Rank> ranks_;
  std::vector<Issued> issued_;
  double now_ = 0;
  bool job_failed_ = false;
  int64_t completed_ = 0, fused_ = 0, failed_ = 0;
};

// A job without mistakes of its own, whose ranks have uneven data. In each epoch rank
// r submits the first n_r steps of one list, in an order of its own, without waiting
// for any; then it joins. Steps are reductions of all ranks or collectives of process
// sets, which come and go between epochs. What must become of each step follows from
// n alone: it fails if zeros would make it wrong and somebody lacks it.
class JoinSimulation {
 public:
  explicit JoinSimulation(uint64_t seed) : random_(seed) {
    size_ = 1 + Random(5);
    coordinator_ = std::make_unique<Coordinator>(size_, Random(2) * 200);
    ranks_.resize(size_);
    const int64_t epochs = 1 + Random(4);
    for (int64_t epoch = 0; epoch < epochs; ++epoch) AddEpoch();
    if (Chance(10)) leaver_ = Random(size_);
  }

  void Run() {
    size_t before;
    do {
      while (!::testing::Test::HasFatalFailure() && Step()) {
      }
      before = issued_.size();
      TakeDecisions();
    } while (!::testing::Test::HasFatalFailure() && issued_.size() > before);
    if (!::testing::Test::HasFatalFailure()) CheckEnd();
  }

  int64_t zeros() const { return zeros_; }
  int64_t failed() const { return failed_; }

 private:
  enum class End { kNone, kOk, kFailed };
  struct Item {
    Shared description;
    bool fails = false;
    int32_t answer = 0;  // of a set that is added or removed
    End end = End::kNone;
  };
  struct Rank {
    std::vector<Item> program;
    size_t next = 0;
    bool waits = false;  // for an agreement
    bool left = false, known_left = false;
    std::deque<size_t> to_coordinator;
    std::deque<size_t> decisions;
    std::map<std::pair<int32_t, std::string>, std::deque<size_t>> pending;
    bool in_batch = false;
  };
  struct Issued {
    Decision decision;
    std::set<int> begun;
  };

  int64_t Random(int64_t below) { return random_() % below; }
  bool Chance(int percent) { return Random(100) < percent; }

  void OnAll(const Description& description, bool fails, int32_t answer = 0) {
    for (Rank& rank : ranks_) {
      rank.program.push_back({Share(description), fails, answer});
    }
  }

  void AddEpoch() {
    if (Chance(60)) {
      std::vector<int> members;
      for (int rank = 0; rank < size_; ++rank) {
        if (Chance(50)) members.push_back(rank);
      }
      if (members.empty()) members.push_back(Random(size_));
      const bool known = static_cast<int>(members.size()) == size_ ||
                         std::any_of(sets_.begin(), sets_.end(), [&](const auto& set) {
                           return set.second == members;
                         });
      OnAll(AddSet(members), known, last_set_ + 1);
      if (!known) sets_[++last_set_] = members;
    }
    std::vector<int64_t> counts;
    const int64_t most = Random(12);
    for (int rank = 0; rank < size_; ++rank) {
      counts.push_back(Chance(30) ? most : Random(most + 1));
    }
    std::vector<std::vector<Item>> programs(size_);
    for (int64_t step = 0; step < most; ++step) {
      AddStep("s" + std::to_string(step), step, counts, &programs);
    }
    for (int rank = 0; rank < size_; ++rank) {
      std::shuffle(programs[rank].begin(), programs[rank].end(), random_);
      for (Item& item : programs[rank]) ranks_[rank].program.push_back(item);
    }
    OnAll(Join(), false);
    if (!sets_.empty() && Chance(40)) {
      const auto set = std::next(sets_.begin(), Random(sets_.size()));
      OnAll(RemoveSet(set->second), false, set->first);
      sets_.erase(set);
    }
  }

  void AddStep(const std::string& name, int64_t step,
               const std::vector<int64_t>& counts,
               std::vector<std::vector<Item>>* programs) {
    Description description = Allreduce(name, 1 + Random(30));
    std::vector<int> members;
    for (int rank = 0; rank < size_; ++rank) members.push_back(rank);
    bool wrong = Chance(20);
    if (wrong) description.reduction.op = ReduceOp::kMax;
    if (!sets_.empty() && Chance(30)) {
      const auto set = std::next(sets_.begin(), Random(sets_.size()));
      description.process_set = set->first;
      members = set->second;
      wrong = true;
    }
    const bool lacked = std::any_of(members.begin(), members.end(),
                                    [&](int rank) { return counts[rank] <= step; });
    const Shared shared = Share(description);
    for (int rank : members) {
      if (counts[rank] > step) (*programs)[rank].push_back({shared, wrong && lacked});
    }
  }

  bool Step() {
    std::vector<std::pair<int, int>> possible;
    for (int r = 0; r < size_; ++r) {
      const Rank& rank = ranks_[r];
      const bool leaves = leaver_ == r && !rank.in_batch && Chance(2);
      if (!rank.left && leaves) possible.emplace_back(3, r);
      const bool submits = !rank.waits && rank.next < rank.program.size();
      if (!rank.left && submits) possible.emplace_back(0, r);
      const bool tells = !rank.to_coordinator.empty() || rank.left != rank.known_left;
      if (tells) possible.emplace_back(1, r);
      if (!rank.left && !rank.decisions.empty() && CanExecute(r)) {
        possible.emplace_back(2, r);
      }
    }
    if (broken_off_ || possible.empty()) return false;
    const auto [what, r] = possible[Random(possible.size())];
    if (what == 0) Submit(r);
    if (what == 1) TellCoordinator(r);
    if (what == 2) Execute(r);
    if (what == 3) ranks_[r].left = true;
    return true;
  }

  void Submit(int r) {
    Rank& rank = ranks_[r];
    const Description& description = *rank.program[rank.next].description;
    rank.pending[{description.process_set, description.name}].push_back(rank.next);
    rank.waits = IsAgreement(description.kind);
    rank.to_coordinator.push_back(rank.next++);
  }

  void TellCoordinator(int r) {
    Rank& rank = ranks_[r];
    now_ += 1;
    if (rank.to_coordinator.empty()) {
      rank.known_left = true;
      coordinator_->Leave(r, "rank " + std::to_string(r) + " left");
    } else {
      const Shared description = rank.program[rank.to_coordinator.front()].description;
      rank.to_coordinator.pop_front();
      if (description->kind == Kind::kJoin) last_to_join_ = r;
      coordinator_->Submit(r, description, now_);
    }
    if (Chance(50)) TakeDecisions();
  }

  void TakeDecisions() {
    Decision decision;
    while (coordinator_->Next(&decision)) {
      if (decision.type == Decision::Type::kAgree && decision.agreed == Kind::kJoin) {
        ASSERT_EQ(decision.answer, last_to_join_);
      }
      issued_.push_back({decision, {}});
      for (Rank& rank : ranks_) rank.decisions.push_back(issued_.size() - 1);
    }
  }

  bool CanExecute(int r) {
    if (!ranks_[r].in_batch) return true;
    const Issued& issued = issued_[ranks_[r].decisions.front()];
    return std::all_of(issued.decision.ranks.begin(), issued.decision.ranks.end(),
                       [&](int member) {
                         return issued.begun.count(member) == 1 || ranks_[member].left;
                       });
  }

  void Execute(int r) {
    Rank& rank = ranks_[r];
    Issued& issued = issued_[rank.decisions.front()];
    const Decision& decision = issued.decision;
    const auto& concerned = decision.ranks;
    if (std::find(concerned.begin(), concerned.end(), r) == concerned.end()) {
      rank.decisions.pop_front();
      return;
    }
    if (decision.type == Decision::Type::kRun && !rank.in_batch) {
      rank.in_batch = true;
      issued.begun.insert(r);
      return;
    }
    if (decision.type == Decision::Type::kRun &&
        issued.begun.size() < concerned.size()) {
      broken_off_ = true;  // a member has left in the middle
      return;
    }
    rank.in_batch = false;
    rank.decisions.pop_front();
    for (const TensorKey& key : decision.tensors) EndOne(r, key, decision);
  }

  void EndOne(int r, const TensorKey& key, const Decision& decision) {
    Rank& rank = ranks_[r];
    std::deque<size_t>& pending = rank.pending[{key.process_set, key.name}];
    const auto zeros = std::find_if(
        decision.zeros.begin(), decision.zeros.end(),
        [&](const auto& zeros) { return zeros.description->name == key.name; });
    if (zeros != decision.zeros.end() &&
        std::count(zeros->ranks.begin(), zeros->ranks.end(), r) == 1) {
      ASSERT_EQ(key.process_set, 0);
      ASSERT_TRUE(pending.empty()) << "zeros for what the rank has";
      ASSERT_TRUE(rank.waits) << "zeros of a rank that has not joined";
      zeros_ += 1;
      return;
    }
    ASSERT_FALSE(pending.empty()) << "rank " << r << " has no '" << key.name << "'";
    Item& item = rank.program[pending.front()];
    pending.pop_front();
    ASSERT_EQ(item.end, End::kNone);
    const bool ok = decision.type != Decision::Type::kFail;
    item.end = ok ? End::kOk : End::kFailed;
    failed_ += ok ? 0 : 1;
    // After a departure sets that were to come never did.
    const bool departed = leaver_ >= 0 && ranks_[leaver_].known_left;
    ASSERT_TRUE(departed || ok != item.fails) << decision.text;
    ASSERT_TRUE(departed || !decision.departed);
    if (zeros != decision.zeros.end()) {
      ASSERT_TRUE(zeros->description->Matches(*item.description));
    }
    if (!IsAgreement(item.description->kind)) return;
    rank.waits = false;
    if (ok && item.description->kind != Kind::kJoin) {
      ASSERT_EQ(decision.agreed, item.description->kind);
      ASSERT_EQ(decision.answer, item.answer);
      ASSERT_EQ(decision.members, item.description->members);
    }
  }

  void CheckEnd() {
    if (broken_off_) return;
    for (int r = 0; r < size_; ++r) {
      const Rank& rank = ranks_[r];
      if (rank.left) continue;
      ASSERT_EQ(rank.next, rank.program.size()) << "rank " << r << " hangs";
      for (const Item& item : rank.program) {
        // After a departure nobody says any more that he lacks a set's collective.
        const bool may_wait = leaver_ >= 0 && item.description->process_set != 0;
        ASSERT_TRUE(may_wait || item.end != End::kNone) << item.description->name;
      }
    }
    if (leaver_ < 0) {
      ASSERT_THAT(coordinator_->Stalls(), IsEmpty());
    }
  }

  std::mt19937_64 random_;
  int size_ = 0;
  std::unique_ptr<Coordinator> coordinator_;
  std::vector<Rank> ranks_;
  std::vector<Issued> issued_;
  std::map<int32_t, std::vector<int>> sets_;
  int32_t last_set_ = 0;
  int leaver_ = -1;
  int last_to_join_ = -1;
  double now_ = 0;
  bool broken_off_ = false;
  int64_t zeros_ = 0, failed_ = 0;
};

TEST(SimulationTest, RandomSchedulesWithSetsAndJoins) {
  int64_t zeros = 0, failed = 0;
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    JoinSimulation simulation(seed);
    simulation.Run();
    if (HasFatalFailure()) return;
    zeros += simulation.zeros();
    failed += simulation.failed();
  }
  EXPECT_GT(zeros, 20000);
  EXPECT_GT(failed, 5000);
}

TEST(SimulationTest, ThousandsOfRandomSchedules) {
  int64_t completed = 0, fused = 0, failed = 0, broken_off = 0;
  for (uint64_t seed = 0; seed < 8000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Simulation simulation(seed);
    simulation.Run();
    if (HasFatalFailure()) return;
    completed += simulation.completed();
    fused += simulation.fused();
    failed += simulation.failed();
    broken_off += simulation.broken_off();
  }
  // The schedules do come to what they are for.
  EXPECT_GT(completed, 100000);
  EXPECT_GT(fused, 10000);
  EXPECT_GT(failed, 10000);
  EXPECT_GT(broken_off, 10);
  EXPECT_LT(broken_off, 4000);
}

}  // namespace
}  // namespace keras_hvd
