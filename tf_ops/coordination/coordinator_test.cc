// The order of the collectives, case by case: fusion, mistakes, departures, stalls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <chrono>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tf_ops/coordination/coordinator_testing.h"

namespace keras_hvd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::StartsWith;

TEST(CoordinatorTest, NothingRunsBeforeTheLastRankHasSubmitted) {
  Coordinator coordinator(3, kFusionBytes);
  Submit(&coordinator, 2, Share(Allreduce("a")), 0);
  Submit(&coordinator, 0, Share(Allreduce("a")), 0);
  EXPECT_THAT(TakeAll(&coordinator), IsEmpty());
  Submit(&coordinator, 1, Share(Allreduce("a")), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(0, 1, 2));
  EXPECT_THAT(Names(decisions[0]), ElementsAre("a"));
}

TEST(CoordinatorTest, OrderIsThatInWhichTheLastRanksCame) {
  Coordinator coordinator(2, 0);
  for (const char* name : {"a", "b", "c"}) {
    Submit(&coordinator, 0, Share(Allreduce(name)), 0);
  }
  std::vector<std::string> order;
  for (const char* name : {"c", "a", "b"}) {
    Submit(&coordinator, 1, Share(Allreduce(name)), 0);
  }
  for (const Decision& decision : TakeAll(&coordinator)) {
    order.push_back(Names(decision).front());
  }
  EXPECT_THAT(order, ElementsAre("c", "a", "b"));
}

TEST(CoordinatorTest, AWorldOfOneRunsAtOnce) {
  Coordinator coordinator(1, kFusionBytes);
  Submit(&coordinator, 0, Share(Barrier("b")), 0);
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
  Submit(&coordinator, 0, Share(Allreduce("b", 1)), 0);
  Submit(&coordinator, 1, Share(Allreduce("b", 2)), 0);
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
  Submit(&coordinator, 0, Share(rank0), 0);
  Submit(&coordinator, 1, Share(rank1), 0);
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
  for (int rank : {0, 1, 3})
    Submit(&coordinator, rank, Share(Allreduce("grad/w", 3)), 0);
  Submit(&coordinator, 2, Share(Allreduce("grad/w", 4)), 0);
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

Description Labelled(const std::string& labels) {
  Description description = Allreduce("adam/gradients/0", 3);
  for (int i = 0; i < 4; ++i) description.tensors.push_back(description.tensors[0]);
  description.labels = labels;
  return description;
}

TEST(MismatchTest, OfLabelsNamesTheFirstThatDiffers) {
  const Description base = Labelled("a/w\na/b\nb/w\nb/b\nc/w\n2 passes averaged");
  const std::string four = "a/w\na/b\nb/w\nb/b";
  EXPECT_THAT(MismatchText(base, Labelled(four + "\nd/w\n2 passes averaged")),
              AllOf(HasSubstr("rank 0: allreduce Sum of 5 tensors float32[3], "
                              "float32[3], float32[3], ..., number 5 is 'c/w' of "
                              "float32[3]; rank 1"),
                    HasSubstr("number 5 is 'd/w' of float32[3])")));
  EXPECT_THAT(MismatchText(base, Labelled(four + "\nc/w\n2 passes added up")),
              AllOf(HasSubstr(", with '2 passes averaged'; rank 1"),
                    HasSubstr(", with '2 passes added up')")));
  EXPECT_THAT(MismatchText(base, Labelled(four + "\nc/w")),
              AllOf(HasSubstr(", with '2 passes averaged'; rank 1"),
                    HasSubstr("..., which are all)")));
  Description fewer = Labelled(four + "\n2 passes averaged");
  fewer.tensors.pop_back();
  EXPECT_THAT(MismatchText(base, fewer),
              AllOf(HasSubstr("number 5 is 'c/w' of float32[3]; rank 1"),
                    HasSubstr(", with '2 passes averaged')")));
  EXPECT_THAT(MismatchText(base, Labelled("")), HasSubstr("number 1 is 'a/w'"));
}

TEST(MismatchTest, OfShapesShowsTheLabelOfTheFirst) {
  const Description base = Labelled("a/w\na/b\nb/w\nb/b\nc/w");
  Description other = base;
  other.tensors[3].shape = {4};
  EXPECT_THAT(MismatchText(base, other),
              AllOf(HasSubstr("number 4 is 'b/b' of float32[3]; rank 1"),
                    HasSubstr("number 4 is 'b/b' of float32[4])")));
}

// How many decisions to fail two requests of ranks 0 and 1 lead to.
int FailuresOf(const Description& first, const Description& second) {
  Coordinator coordinator(2, kFusionBytes);
  Submit(&coordinator, 0, Share(first), 0);
  Submit(&coordinator, 1, Share(second), 0);
  int failures = 0;
  for (const Decision& decision : TakeAll(&coordinator)) {
    failures += decision.type == Decision::Type::kFail;
  }
  return failures;
}

TEST(LabelsTest, MayLackFirstParts) {
  const Description base = Labelled("a/w\na/b\nb/w\nb/b\nc/w");
  EXPECT_EQ(FailuresOf(base, base), 0);
  EXPECT_EQ(FailuresOf(base, Labelled("a/w\na/b\nb/w\nb/b\nx/c/w")), 0);
  EXPECT_EQ(FailuresOf(Labelled("m/a/w\na/b\nb/w\nb/b\nx/y/c/w"), base), 0);
  for (const char* last : {"w", "xc/w", "c/w/x", "y/w", "", "c/w\n"}) {
    const int failures =
        FailuresOf(base, Labelled(std::string("a/w\na/b\nb/w\nb/b\n") + last));
    const std::string label = last;
    EXPECT_EQ(failures, label == "w" || label == "c/w\n" ? 0 : 1) << label;
  }
  EXPECT_EQ(FailuresOf(Labelled("x/a/w\na/b\nb/w\nb/b\nc/w"),
                       Labelled("y/a/w\na/b\nb/w\nb/b\nc/w")),
            1);
}

TEST(MismatchTest, OfALongNameShowsWholeCharactersOfItsEnds) {
  // The cuts fall into a character of two bytes, and of three.
  std::string name = std::string(255, 'a') + "\u00e9" + std::string(100000, 'b');
  name += "\u20ac" + std::string(255, 'c');
  Coordinator coordinator(2, kFusionBytes);
  for (int rank : {0, 1}) Submit(&coordinator, rank, Share(Allreduce(name, rank)), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  const std::string shown = "'" + std::string(255, 'a') + "..." + std::string(255, 'c');
  EXPECT_THAT(decisions[0].text,
              StartsWith(shown + "' (100515 bytes) differs between ranks"));
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
  Submit(&coordinator, 0, Share(Allreduce("x", 1)), 0);
  Submit(&coordinator, 1, Share(Allreduce("x", 2)), 0);
  std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(0, 1));
  const std::string text = decisions[0].text;

  // The others go on to the next request of the name before rank 2 comes to the first.
  Submit(&coordinator, 0, Share(Allreduce("x", 5)), 0);
  Submit(&coordinator, 1, Share(Allreduce("x", 5)), 0);
  Submit(&coordinator, 2, Share(Allreduce("x", 1)), 0);
  decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kFail);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(2));
  EXPECT_EQ(decisions[0].text, text);

  Submit(&coordinator, 2, Share(Allreduce("x", 5)), 0);
  decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
}

TEST(DuplicateTest, FailsOnAllRanksAndLeavesTheFirstAlone) {
  Coordinator coordinator(2, kFusionBytes);
  Submit(&coordinator, 0, Share(Allreduce("x")), 0);
  Submit(&coordinator, 0, Share(Allreduce("x")), 0, /*duplicate=*/true);
  EXPECT_THAT(TakeAll(&coordinator), IsEmpty());
  Submit(&coordinator, 1, Share(Allreduce("x")), 0);
  std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
  EXPECT_EQ(decisions[1].type, Decision::Type::kFail);
  EXPECT_THAT(decisions[1].ranks, ElementsAre(0));
  EXPECT_THAT(decisions[1].text,
              HasSubstr("allreduce 'x' was submitted on rank 0 by a second op, or by "
                        "another call of the same op, while the first was pending"));
  Submit(&coordinator, 1, Share(Allreduce("x")), 0);
  decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(1));
  EXPECT_THAT(decisions[0].text, HasSubstr("submitted on rank 0 by a second op"));
}

TEST(QueueTest, TheSameOpsRequestsOfOneNameAreServedInOrder) {
  Coordinator coordinator(2, 0);
  for (int64_t floats : {1, 2, 3}) {
    Submit(&coordinator, 0, Share(Allreduce("x", floats)), 0);
  }
  for (int64_t floats : {1, 2, 3}) {
    Submit(&coordinator, 1, Share(Allreduce("x", floats)), 0);
    const std::vector<Decision> decisions = TakeAll(&coordinator);
    ASSERT_EQ(decisions.size(), 1u);
    // Were they not paired in order, sizes would differ.
    EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
  }
}

// ---- Merged submissions

MergedSubmission Of(std::vector<int> ranks, Shared description) {
  MergedSubmission submission;
  submission.description = std::move(description);
  submission.ranks = std::move(ranks);
  return submission;
}

TEST(GroupTest, CountsForEachOfItsRanks) {
  Coordinator coordinator(5, kFusionBytes);
  coordinator.Submit(Of({1, 3}, Share(Allreduce("x"))), 0);
  coordinator.Submit(Of({0, 4}, Share(Allreduce("x"))), 0);
  EXPECT_THAT(TakeAll(&coordinator), IsEmpty());
  coordinator.Submit(Of({2}, Share(Allreduce("x"))), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(0, 1, 2, 3, 4));
}

TEST(GroupTest, EachRanksRequestIsItsNext) {
  Coordinator coordinator(3, 0);
  for (int rank : {0, 0, 1}) Submit(&coordinator, rank, Share(Allreduce("x", 7)), 0);
  coordinator.Submit(Of({0, 1, 2}, Share(Allreduce("x", 7))), 0);
  EXPECT_EQ(TakeAll(&coordinator).size(), 1u);
  ASSERT_EQ(coordinator.Stalls().size(), 1u);
  EXPECT_THAT(coordinator.Stalls()[0].waiting, ElementsAre(0, 1));
  Submit(&coordinator, 2, Share(Allreduce("x", 7)), 0);
  EXPECT_EQ(TakeAll(&coordinator).size(), 1u);
  EXPECT_THAT(coordinator.Stalls()[0].waiting, ElementsAre(0));
}

TEST(GroupTest, InputsAndTimesAreInTheOrderOfRanks) {
  Coordinator coordinator(4, kFusionBytes);
  coordinator.set_wants_times(true);
  const auto at = [](int seconds) {
    return Clock::time_point(std::chrono::seconds(seconds));
  };
  MergedSubmission odd = Of({1, 3}, Share(Allreduce("x")));
  odd.submitted = {at(10), at(30)};
  odd.inputs = {"of 1", "of 3"};
  MergedSubmission even = Of({0, 2}, Share(Allreduce("x")));
  even.inputs = {"of 0", "of 2"};
  coordinator.Submit(std::move(odd), 5);
  coordinator.Submit(std::move(even), 40);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_THAT(decisions[0].given.at(0).inputs,
              ElementsAre("of 0", "of 1", "of 2", "of 3"));
  EXPECT_THAT(decisions[0].requests.at(0).since,
              ElementsAre(Pair(0, 40), Pair(1, 10), Pair(2, 40), Pair(3, 30)));
}

TEST(GroupTest, OfStrangersOnlyTheMembersCount) {
  Coordinator coordinator(4, kFusionBytes);
  coordinator.AddProcessSet(7, {1, 3});
  coordinator.Submit(Of({0, 1, 3}, Share(Allreduce("x", 1, ReduceOp::kSum, 7))), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_EQ(decisions[0].text, "rank 0 is not in process set 7");
  EXPECT_THAT(decisions[1].ranks, ElementsAre(1, 3));
}

TEST(GroupTest, WhatDiffersFailsOnAllOfItAtOnceAndOnTheRestLater) {
  Coordinator coordinator(5, kFusionBytes);
  coordinator.Submit(Of({1, 2}, Share(Allreduce("x", 1))), 0);
  coordinator.Submit(Of({0, 3}, Share(Allreduce("x", 2))), 0);
  std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(decisions[0].text,
            "'x' differs between ranks (ranks 0, 3: allreduce Sum of float32[2]; ranks "
            "1, 2: allreduce Sum of float32[1]). Every rank must submit the same under "
            "one name");
  // Rank 4 is owed the failure; for the others this is the next round.
  coordinator.Submit(Of({0, 1, 2, 3, 4}, Share(Allreduce("x", 1))), 0);
  decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(4));
  Submit(&coordinator, 4, Share(Allreduce("x", 1)), 0);
  ASSERT_EQ(TakeAll(&coordinator).size(), 1u);
}

TEST(GroupTest, LosesARankThatLeaves) {
  Coordinator coordinator(4, kFusionBytes);
  coordinator.Submit(Of({1, 2}, Share(Allreduce("x"))), 0);
  coordinator.Submit(Of({1}, Share(Allreduce("x"))), 0);
  coordinator.Leave(1, "rank 1 left");
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(2));
  EXPECT_THAT(coordinator.Stalls(), IsEmpty());
}

TEST(GroupTest, EachRankJoinsForItself) {
  Coordinator coordinator(3, kFusionBytes);
  Submit(&coordinator, 0, Share(Broadcast("x")), 0);
  coordinator.Submit(Of({1, 2}, Share(Join())), 0);
  std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_THAT(decisions[0].text, StartsWith("rank 1 has joined"));
  Submit(&coordinator, 0, Share(Join()), 0);
  decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].answer, 0);
}

TEST(GroupTest, AnyNumberOfThemHaveALastSubmission) {
  Coordinator coordinator(10, kFusionBytes);
  Submit(&coordinator, 3, Share(Allreduce("first")), 0);
  for (int list = 1; list < 1 << 10; ++list) {
    std::vector<int> ranks;
    for (int rank = 0; rank < 10; ++rank) {
      if ((list >> rank & 1) != 0) ranks.push_back(rank);
    }
    const std::string name = std::to_string(list);
    coordinator.Submit(Of(ranks, Share(Allreduce(name))), 0);
    for (int rank : ranks) {
      ASSERT_EQ(coordinator.LastSubmission(rank), "allreduce '" + name + "'");
    }
  }
  EXPECT_EQ(coordinator.LastSubmission(3), "allreduce '1023'");
}

// ---- Process sets

TEST(ProcessSetTest, OnlyItsMembersAreWaitedFor) {
  Coordinator coordinator(4, kFusionBytes);
  coordinator.AddProcessSet(7, {1, 3});
  Submit(&coordinator, 3, Share(Allreduce("x", 10, ReduceOp::kSum, 7)), 0);
  Submit(&coordinator, 1, Share(Allreduce("x", 10, ReduceOp::kSum, 7)), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(1, 3));
  EXPECT_EQ(decisions[0].tensors[0].process_set, 7);
}

TEST(ProcessSetTest, OneNameInTwoSetsIsTwoRequests) {
  Coordinator coordinator(2, kFusionBytes);
  coordinator.AddProcessSet(1, {0, 1});
  Submit(&coordinator, 0, Share(Allreduce("x", 1, ReduceOp::kSum, 0)), 0);
  Submit(&coordinator, 1, Share(Allreduce("x", 2, ReduceOp::kSum, 1)), 0);
  EXPECT_THAT(TakeAll(&coordinator), IsEmpty());
}

TEST(ProcessSetTest, ARankThatIsNoMemberFailsAtOnceAndAlone) {
  Coordinator coordinator(3, kFusionBytes);
  coordinator.AddProcessSet(1, {0, 2});
  for (int32_t set : {1, 9}) {
    Submit(&coordinator, 1, Share(Allreduce("x", 1, ReduceOp::kSum, set)), 0);
    const std::vector<Decision> decisions = TakeAll(&coordinator);
    ASSERT_EQ(decisions.size(), 1u);
    EXPECT_EQ(decisions[0].type, Decision::Type::kFail);
    EXPECT_THAT(decisions[0].ranks, ElementsAre(1));
    EXPECT_EQ(decisions[0].text, set == 1 ? "rank 1 is not in process set 1"
                                          : "there is no process set 9 any more");
  }
}

// ---- Departures

TEST(DepartureTest, EndsWhatWaitsForTheRankAndSaysHowItLeft) {
  Coordinator coordinator(3, kFusionBytes);
  Submit(&coordinator, 0, Share(Allreduce("x")), 0);
  coordinator.Leave(2, "rank 2 went home");
  std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kFail);
  EXPECT_TRUE(decisions[0].departed);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(0));
  EXPECT_EQ(decisions[0].text, "'x' cannot be completed: rank 2 went home");

  Submit(&coordinator, 1, Share(Allreduce("x")), 0);
  decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_TRUE(decisions[0].departed);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(1));
}

TEST(DepartureTest, TheRankThatLeftFirstIsNamed) {
  Coordinator coordinator(3, kFusionBytes);
  coordinator.Leave(2, "rank 2 went home");
  coordinator.Leave(0, "rank 0 went home");
  Submit(&coordinator, 1, Share(Allreduce("x")), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].text, "'x' cannot be completed: rank 2 went home");
}

TEST(DepartureTest, WhatTheRankStillHadWaitingIsNotRunWithoutIt) {
  Coordinator coordinator(2, kFusionBytes);
  Submit(&coordinator, 1, Share(Allreduce("x")), 0);
  coordinator.Leave(1, "rank 1 went home");
  EXPECT_THAT(TakeAll(&coordinator), IsEmpty());
  EXPECT_THAT(coordinator.Stalls(), IsEmpty());
  Submit(&coordinator, 0, Share(Allreduce("x")), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kFail);
  EXPECT_TRUE(decisions[0].departed);
  EXPECT_THAT(decisions[0].ranks, ElementsAre(0));
}

TEST(DepartureTest, DoesNotConcernSetsThatTheRankIsNotIn) {
  Coordinator coordinator(3, kFusionBytes);
  coordinator.AddProcessSet(1, {0, 1});
  Submit(&coordinator, 0, Share(Allreduce("x", 1, ReduceOp::kSum, 1)), 0);
  coordinator.Leave(2, "rank 2 went home");
  EXPECT_THAT(TakeAll(&coordinator), IsEmpty());
  Submit(&coordinator, 1, Share(Allreduce("x", 1, ReduceOp::kSum, 1)), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
}

// ---- Stalls and memory

TEST(StallTest, ListsWhoWaitsAndWhoIsMissingTheOldestFirst) {
  Coordinator coordinator(3, kFusionBytes);
  Submit(&coordinator, 2, Share(Broadcast("late")), 20);
  Submit(&coordinator, 0, Share(Allreduce("done")), 21);
  Submit(&coordinator, 0, Share(Allreduce("later")), 22);
  Submit(&coordinator, 0, Share(Broadcast("late")), 23);
  Submit(&coordinator, 1, Share(Allreduce("done")), 24);
  Submit(&coordinator, 2, Share(Allreduce("done")), 25);
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
  Submit(&coordinator, 0, Share(Allreduce("x")), 10);
  Submit(&coordinator, 0, Share(Allreduce("x")), 50);
  Submit(&coordinator, 1, Share(Allreduce("x")), 60);
  ASSERT_EQ(coordinator.Stalls().size(), 1u);
  EXPECT_EQ(coordinator.Stalls()[0].since, 50);
}

TEST(MemoryTest, IdleNamesAreForgottenAndOthersAreNot) {
  Coordinator coordinator(2, kFusionBytes);
  Submit(&coordinator, 0, Share(Allreduce("waits")), 0);
  Submit(&coordinator, 0, Share(Allreduce("owed", 1)), 0);
  coordinator.AddProcessSet(1, {0, 1});
  Description owed = Allreduce("owed", 1, ReduceOp::kSum, 1);
  Submit(&coordinator, 0, Share(owed), 0);
  Submit(&coordinator, 0, Share(owed), 0, /*duplicate=*/true);
  Submit(&coordinator, 1, Share(owed), 0);
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

  Submit(&coordinator, 1, Share(Allreduce("waits")), 0);
  Submit(&coordinator, 1, Share(owed), 0);
  const std::vector<Decision> decisions = TakeAll(&coordinator);
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_EQ(decisions[0].type, Decision::Type::kRun);
  EXPECT_EQ(decisions[1].type, Decision::Type::kFail);
  EXPECT_THAT(decisions[1].ranks, ElementsAre(1));
}

}  // namespace
}  // namespace keras_hvd
