// Agreements: process sets that come and go, and ranks that have joined.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "tf_ops/coordination/coordinator_testing.h"

namespace keras_hvd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// ---- Process sets

// The only decision that follows from all ranks' asking for something.
Decision AllAsk(Coordinator* coordinator, int size, const Description& description) {
  SubmitOnAll(coordinator, size, description);
  const std::vector<Decision> decisions = TakeAll(coordinator);
  EXPECT_EQ(decisions.size(), 1u);
  return decisions.empty() ? Decision() : decisions.back();
}

TEST(AgreementTest, SetsGetNumbersOnceAllRanksHaveAskedForThem) {
  Coordinator coordinator(3, kFusionBytes);
  Submit(&coordinator, 0, Share(AddSet({0, 2})), 0);
  Submit(&coordinator, 2, Share(AddSet({0, 2})), 0);
  EXPECT_THAT(TakeAll(&coordinator), IsEmpty());
  Submit(&coordinator, 1, Share(AddSet({0, 2})), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kAgree);
  EXPECT_EQ(decisions[0].agreed, Kind::kAddProcessSet);
  EXPECT_EQ(decisions[0].answer, 1);
  EXPECT_THAT(decisions[0].members, ElementsAre(0, 2));
  EXPECT_THAT(decisions[0].ranks, ElementsAre(0, 1, 2));
  EXPECT_EQ(AllAsk(&coordinator, 3, AddSet({1})).answer, 2);
  Submit(&coordinator, 1, Share(Allreduce("x", 1, ReduceOp::kSum, 2)), 0);
  EXPECT_THAT(TakeAll(&coordinator)[0].ranks, ElementsAre(1));
}

TEST(AgreementTest, TheNumberOfARemovedSetIsNotGivenAgain) {
  Coordinator coordinator(2, kFusionBytes);
  EXPECT_EQ(AllAsk(&coordinator, 2, AddSet({1})).answer, 1);
  const Decision removed = AllAsk(&coordinator, 2, RemoveSet({1}));
  EXPECT_EQ(removed.type, Decision::Type::kAgree);
  EXPECT_EQ(removed.agreed, Kind::kRemoveProcessSet);
  EXPECT_EQ(removed.answer, 1);
  Submit(&coordinator, 1, Share(Allreduce("x", 1, ReduceOp::kSum, 1)), 0);
  EXPECT_EQ(TakeAll(&coordinator)[0].text, "there is no process set 1 any more");
  EXPECT_EQ(AllAsk(&coordinator, 2, AddSet({1})).answer, 2);
}

// Rank 1 has been in a job that had sets, rank 2 in one that had more.
TEST(AgreementTest, NoRankGetsANumberOfAnEarlierJobAgain) {
  Coordinator coordinator(3, kFusionBytes);
  const int32_t last_earlier_sets[] = {0, 3, 7};
  const auto add = [&](std::vector<int> members) {
    Description description = AddSet(std::move(members));
    for (int rank = 0; rank < 3; ++rank) {
      description.last_earlier_set = last_earlier_sets[rank];
      Submit(&coordinator, rank, Share(description), 0);
    }
    return TakeAll(&coordinator).back();
  };
  EXPECT_EQ(add({0, 1}).answer, 8);
  EXPECT_EQ(add({1, 2}).answer, 9);
}

TEST(AgreementTest, ThereIsALastNumber) {
  Coordinator coordinator(2, kFusionBytes);
  Description description = AddSet({1});
  description.last_earlier_set = std::numeric_limits<int32_t>::max();
  EXPECT_THAT(AllAsk(&coordinator, 2, description).text,
              HasSubstr("no number is left for another process set"));
}

TEST(AgreementTest, DifferentSetsAreAnErrorThatNamesWhatEachRankGave) {
  Coordinator coordinator(3, kFusionBytes);
  Submit(&coordinator, 0, Share(AddSet({0, 1})), 0);
  Submit(&coordinator, 1, Share(AddSet({0, 2})), 0);
  Submit(&coordinator, 2, Share(RemoveSet({0, 1})), 0);
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
  EXPECT_THAT(again.text, HasSubstr("process set 1 already has rank 0"));
  EXPECT_THAT(AllAsk(&coordinator, 2, AddSet({0, 1})).text,
              HasSubstr("process set 0 already has ranks 0, 1"));
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
  Submit(&coordinator, 1, alone, 0);
  Submit(&coordinator, 0, x, 0);
  SubmitOnAll(&coordinator, 2, RemoveSet({1}));
  Submit(&coordinator, 1, x, 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 3u);
  // A batch settled before is handed out before, with its set's ranks.
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(1));
  EXPECT_EQ(decisions[1].type, Decision::Type::kAgree);
  EXPECT_EQ(decisions[1].answer, 4);
  EXPECT_EQ(decisions[2].type, Decision::Type::kRun);

  coordinator.AddProcessSet(5, {1});
  coordinator.AddProcessSet(6, {0});
  Submit(&coordinator, 1, Share(Allreduce("y", 1, ReduceOp::kSum, 3)), 0);
  const Decision removed = AllAsk(&coordinator, 2, RemoveSet({0}));
  EXPECT_EQ(removed.answer, 6);
}

TEST(AgreementTest, ASetInUseIsNotRemoved) {
  Coordinator coordinator(3, kFusionBytes);
  coordinator.AddProcessSet(1, {0, 2});
  Submit(&coordinator, 2, Share(Allreduce("x", 1, ReduceOp::kSum, 1)), 0);
  const Decision refused = AllAsk(&coordinator, 3, RemoveSet({0, 2}));
  EXPECT_EQ(refused.type, Decision::Type::kFail);
  EXPECT_EQ(refused.text, "process set 1 is in use: allreduce 'x' waits on rank 2");
  Submit(&coordinator, 0, Share(Allreduce("x", 1, ReduceOp::kSum, 1)), 0);
  EXPECT_EQ(TakeAll(&coordinator).at(0).type, Decision::Type::kRun);
  EXPECT_EQ(AllAsk(&coordinator, 3, RemoveSet({0, 2})).type, Decision::Type::kAgree);
}

TEST(AgreementTest, FailsWhenARankHasLeft) {
  Coordinator coordinator(2, kFusionBytes);
  Submit(&coordinator, 0, Share(AddSet({0})), 0);
  coordinator.Leave(1, "rank 1 left");
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_TRUE(decisions[0].departed);
  EXPECT_EQ(decisions[0].text, "add_process_set() cannot be completed: rank 1 left");
}

// ---- Joins

TEST(JoinTest, EndsWithTheLastRankThatJoined) {
  Coordinator coordinator(3, kFusionBytes);
  for (int time = 0; time < 2; ++time) {
    for (int rank : {2, 0}) Submit(&coordinator, rank, Share(Join()), 0);
    EXPECT_THAT(TakeAll(&coordinator), IsEmpty());
    Submit(&coordinator, 1, Share(Join()), 0);
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
  Submit(&coordinator, 0, Share(Allreduce("before")), 0);
  Submit(&coordinator, 1, Share(Allreduce("both")), 0);
  Submit(&coordinator, 1, Share(Join()), 0);
  Submit(&coordinator, 2, Share(Allreduce("before")), 0);
  Submit(&coordinator, 2, Share(Allreduce("both")), 0);
  Submit(&coordinator, 0, Share(Allreduce("both")), 0);
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
  for (int rank : {2, 0}) Submit(&coordinator, rank, Share(average), 0);
  ASSERT_EQ(TakeAll(&coordinator).at(0).zeros.size(), 1u);
}

TEST(JoinTest, WhatWaitsForTheRankRunsWhenItJoins) {
  Coordinator coordinator(2, 0);
  Submit(&coordinator, 0, Share(Allreduce("x")), 0);
  Submit(&coordinator, 0, Share(Allreduce("x", 7)), 0);
  Submit(&coordinator, 1, Share(Join()), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_EQ(decisions[0].zeros.at(0).description->bytes(), 40);
  EXPECT_EQ(decisions[1].zeros.at(0).description->bytes(), 28);
}

TEST(JoinTest, AfterItEveryRankIsWaitedForAgain) {
  Coordinator coordinator(2, 0);
  Submit(&coordinator, 0, Share(Join()), 0);
  Submit(&coordinator, 1, Share(Join()), 0);
  EXPECT_EQ(TakeAll(&coordinator).size(), 1u);
  Submit(&coordinator, 0, Share(Allreduce("x")), 0);
  EXPECT_THAT(TakeAll(&coordinator), IsEmpty());
  Submit(&coordinator, 1, Share(Allreduce("x")), 0);
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
      if (joins_first) Submit(&coordinator, 2, Share(Join()), 0);
      Submit(&coordinator, 0, Share(description), 0);
      if (!joins_first) Submit(&coordinator, 2, Share(Join()), 0);
      std::vector<Decision> decisions = TakeAll(&coordinator);
      ASSERT_EQ(decisions.size(), 1u);
      EXPECT_EQ(decisions[0].type, Decision::Type::kFail);
      EXPECT_FALSE(decisions[0].departed);
      EXPECT_THAT(decisions[0].ranks, ElementsAre(0));
      EXPECT_THAT(decisions[0].text, HasSubstr("rank 2 has joined"));
      EXPECT_THAT(decisions[0].text, HasSubstr(Details(description)));
      // Nobody is owed anything.
      Submit(&coordinator, 1, Share(Join()), 0);
      Submit(&coordinator, 0, Share(Join()), 0);
      EXPECT_EQ(TakeAll(&coordinator).at(0).answer, 0);
      if (description.process_set == 0) {
        SubmitOnAll(&coordinator, 3, description);
        EXPECT_NE(TakeAll(&coordinator).at(0).type, Decision::Type::kFail);
      }
    }
  }
}

// One goes on to a sum of the same name before another has come to the failed request.
TEST(JoinTest, EachOfTheOthersMeetsTheFailureOnce) {
  Coordinator coordinator(3, 0);
  const Shared wrong = Share(Allreduce("x", 1, ReduceOp::kMax));
  const Shared sum = Share(Allreduce("x"));
  Submit(&coordinator, 0, Share(Join()), 0);
  Submit(&coordinator, 1, wrong, 0);
  Submit(&coordinator, 1, sum, 0);
  Submit(&coordinator, 2, wrong, 0);
  Submit(&coordinator, 2, sum, 0);
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
  Submit(&coordinator, 2, Share(Join()), 0);
  for (int rank : {0, 1}) {
    Submit(&coordinator, rank, Share(Allreduce("x", 1, ReduceOp::kMin, 1)), 0);
  }
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
  EXPECT_THAT(decisions[0].zeros, IsEmpty());
}

TEST(JoinTest, AMistakeOfTheOthersIsTheirs) {
  Coordinator coordinator(4, 0);
  Submit(&coordinator, 3, Share(Join()), 0);
  Submit(&coordinator, 0, Share(Allreduce("x", 1)), 0);
  Submit(&coordinator, 1, Share(Allreduce("x", 2)), 0);
  EXPECT_THAT(TakeAll(&coordinator).at(0).ranks, ElementsAre(0, 1));
  Submit(&coordinator, 2, Share(Join()), 0);  // it will not come to the name any more
  for (int rank : {0, 1}) Submit(&coordinator, rank, Share(Join()), 0);
  EXPECT_EQ(TakeAll(&coordinator).at(0).answer, 1);
  SubmitOnAll(&coordinator, 4, Allreduce("x", 3));
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
}

TEST(JoinTest, FailsWhenARankLeavesJoinedOrNot) {
  for (const bool joined : {false, true}) {
    Coordinator coordinator(3, 0);
    Submit(&coordinator, 0, Share(Join()), 0);
    if (joined) Submit(&coordinator, 2, Share(Join()), 0);
    coordinator.Leave(2, "rank 2 left");
    const std::vector<Decision> decisions = TakeAll(&coordinator);
    ASSERT_EQ(decisions.size(), 1u);
    EXPECT_TRUE(decisions[0].departed);
    EXPECT_THAT(decisions[0].ranks, ElementsAre(0));
    EXPECT_EQ(decisions[0].text, "join() cannot be completed: rank 2 left");
    Submit(&coordinator, 1, Share(Allreduce("x")), 0);
    EXPECT_TRUE(TakeAll(&coordinator).at(0).departed);
  }
}

TEST(JoinTest, IsNoStallWhileOthersGoOnAndJoinedRanksAreNotMissing) {
  Coordinator coordinator(3, 0);
  Submit(&coordinator, 2, Share(Join()), 10);
  Submit(&coordinator, 0, Share(Allreduce("x")), 90);
  const std::vector<Stall> stalls = coordinator.Stalls();
  ASSERT_EQ(stalls.size(), 2u);
  EXPECT_EQ(stalls[0].kind, Kind::kJoin);
  EXPECT_EQ(stalls[0].since, 90);
  EXPECT_THAT(stalls[0].missing, ElementsAre(0, 1));
  EXPECT_EQ(stalls[1].since, 90);
  EXPECT_THAT(stalls[1].waiting, ElementsAre(0));
  EXPECT_THAT(stalls[1].missing, ElementsAre(1));
}

TEST(JoinTest, SaysSinceWhenOthersGoOnAndWhetherZerosCount) {
  Coordinator coordinator(3, 0);
  coordinator.AddProcessSet(1, {0, 1});
  Submit(&coordinator, 2, Share(Join()), 10);
  ASSERT_EQ(coordinator.Stalls().size(), 1u);
  EXPECT_FALSE(coordinator.Stalls()[0].others_go_on);
  // Among themselves they need no zeros.
  for (int rank : {0, 1}) {
    Submit(&coordinator, rank, Share(Allreduce("own", 1, ReduceOp::kSum, 1)), 50);
  }
  ASSERT_EQ(TakeAll(&coordinator).size(), 1u);
  Stall join = coordinator.Stalls().at(0);
  EXPECT_TRUE(join.others_go_on);
  EXPECT_FALSE(join.gave_zeros);
  for (int rank : {0, 1}) Submit(&coordinator, rank, Share(Allreduce("x")), 90);
  ASSERT_EQ(TakeAll(&coordinator).size(), 1u);
  join = coordinator.Stalls().at(0);
  EXPECT_EQ(join.joined, 10);
  EXPECT_EQ(join.since, 90);
  EXPECT_TRUE(join.others_go_on);
  EXPECT_TRUE(join.gave_zeros);
  // The same join is none in which others go on when they have joined too.
  for (int rank : {0, 1}) Submit(&coordinator, rank, Share(Join()), 95);
  ASSERT_EQ(TakeAll(&coordinator).size(), 1u);
  Submit(&coordinator, 0, Share(Join()), 100);
  Submit(&coordinator, 1, Share(Join()), 120);
  join = coordinator.Stalls().at(0);
  EXPECT_EQ(join.joined, 100);
  EXPECT_FALSE(join.others_go_on);
  EXPECT_FALSE(join.gave_zeros);
}

// A departure is heard of first, so no rank ends its waiting requests for that join.
TEST(JoinTest, WhatFailsByADepartureHasNotJoinedForAMoment) {
  Coordinator coordinator(3, kFusionBytes);
  coordinator.AddProcessSet(1, {0, 1});
  coordinator.Leave(2, "rank 2 left");
  const Shared x = Share(Allreduce("x", 1, ReduceOp::kSum, 1));
  Submit(&coordinator, 0, x, 0);
  Submit(&coordinator, 1, Share(Join()), 0);
  std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_TRUE(decisions[0].departed);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(1));
  Submit(&coordinator, 1, x, 0);
  decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
}

}  // namespace
}  // namespace keras_hvd
