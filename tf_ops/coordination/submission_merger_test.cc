// The ranks' submissions: those that go up as one message, those that wait for others,
// and those that do not wait.
#include "tf_ops/coordination/submission_merger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tf_ops/coordination/coordinator_testing.h"

namespace keras_hvd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

Clock::time_point At(int seconds) {
  return Clock::time_point(std::chrono::seconds(seconds));
}

MergedSubmission Of(std::vector<int> ranks, Shared description) {
  MergedSubmission submission;
  submission.description = std::move(description);
  submission.ranks = std::move(ranks);
  return submission;
}

// "a: ranks 0, 1", "rank 2 left".
std::string Text(const Upward& message) {
  if (const auto* departure = std::get_if<RankDeparture>(&message)) {
    return "rank " + std::to_string(departure->rank) + " left";
  }
  const auto& merged = std::get<MergedSubmission>(message);
  return merged.description->name + ": " + RankList(merged.ranks.list());
}

// Below the leader are ranks 1, 2 and 4 of a job of six.
class SubmissionMergerTest : public ::testing::Test {
 protected:
  SubmissionMergerTest() { merger_.AddProcessSet(0, {0, 1, 2, 3, 4, 5}); }

  void Submit(std::vector<int> ranks, const Shared& description) {
    merger_.Submit(Of(std::move(ranks), description));
  }
  void SubmitRun(std::vector<int> ranks, Descriptions descriptions) {
    merger_.Submit({std::make_shared<Descriptions>(std::move(descriptions)),
                    RankSet(std::move(ranks))});
  }
  void SubmitAgain(int rank, const Shared& description) {
    MergedSubmission submission = Of({rank}, description);
    submission.duplicate = true;
    merger_.Submit(std::move(submission));
  }
  std::vector<std::string> Passed() {
    std::vector<std::string> texts;
    Upward message;
    while (merger_.Next(&message)) texts.push_back(Text(message));
    return texts;
  }
  MergedSubmission PassedOne() {
    Upward message;
    EXPECT_TRUE(merger_.Next(&message));
    EXPECT_THAT(Passed(), IsEmpty());
    return std::get<MergedSubmission>(message);
  }
  // The next round of a name is one message again.
  void ExpectMerges(const Shared& description) {
    for (int rank : {2, 1}) Submit({rank}, description);
    EXPECT_THAT(Passed(), IsEmpty());
    Submit({4}, description);
    EXPECT_THAT(Passed(), ElementsAre(description->name + ": ranks 1, 2, 4"));
  }

  SubmissionMerger merger_{{1, 2, 4}};
  const Shared a_ = Share(Allreduce("a"));
  const Shared other_a_ = Share(Allreduce("a", 77));
  const Shared b_ = Share(Allreduce("b"));
};

// ---- One message

TEST_F(SubmissionMergerTest, WhatAllRanksBelowHaveSubmittedIsOneMessage) {
  Submit({4}, a_);
  Submit({1}, a_);
  EXPECT_THAT(Passed(), IsEmpty());
  Submit({2}, a_);
  const MergedSubmission merged = PassedOne();
  EXPECT_EQ(merged.description, a_);
  EXPECT_FALSE(merged.duplicate);
  EXPECT_THAT(merged.ranks, ElementsAre(1, 2, 4));
  EXPECT_THAT(merged.submitted, IsEmpty());
  EXPECT_THAT(merged.inputs, IsEmpty());
}

TEST_F(SubmissionMergerTest, WhatALeaderBelowHasMergedIsMergedWithTheRest) {
  Submit({2}, a_);
  Submit({1, 4}, a_);
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 1, 2, 4"));
  Submit({1, 2, 4}, b_);
  EXPECT_THAT(Passed(), ElementsAre("b: ranks 1, 2, 4"));
}

TEST_F(SubmissionMergerTest, ARunIsMergedAsItsRequestsAre) {
  Submit({2}, a_);
  SubmitRun({1, 4}, {a_, b_});
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 1, 2, 4"));
  SubmitRun({2}, {b_, a_});
  EXPECT_THAT(Passed(), ElementsAre("b: ranks 1, 2, 4"));
  SubmitRun({1, 4}, {a_, b_});
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 1, 2, 4"));
  // A second one of the same ranks is of the next round.
  SubmitRun({1, 4}, {a_, b_});
  SubmitRun({2}, {b_, b_, a_});
  EXPECT_THAT(Passed(),
              ElementsAre("b: ranks 1, 2, 4", "b: ranks 1, 2, 4", "a: ranks 1, 2, 4"));
}

TEST_F(SubmissionMergerTest, WhatDiffersFromARunIsPassedOnAtOnce) {
  SubmitRun({1}, {a_, b_});
  Submit({2}, other_a_);
  EXPECT_THAT(Passed(), ElementsAre("a: rank 1", "a: rank 2"));
  SubmitRun({4}, {b_, a_});
  EXPECT_THAT(Passed(), ElementsAre("a: rank 4"));
  Submit({2}, b_);
  EXPECT_THAT(Passed(), ElementsAre("b: ranks 1, 2, 4"));
  SubmitAgain(1, b_);
  SubmitRun({2, 4}, {b_});
  EXPECT_THAT(Passed(), ElementsAre("b: rank 1", "b: ranks 2, 4"));
  MergedSubmission timed = Of({1}, b_);
  timed.submitted = {At(1)};
  merger_.Submit(timed);
  SubmitRun({2, 4}, {b_});
  EXPECT_THAT(Passed(), ElementsAre("b: rank 1", "b: ranks 2, 4"));
}

TEST_F(SubmissionMergerTest, NothingIsHeldOfARunOnceARankHasLeft) {
  SubmitRun({1}, {a_, b_});
  merger_.Leave({2});
  SubmitRun({4}, {a_, b_});
  const std::vector<std::string> passed = Passed();
  EXPECT_THAT(std::vector(passed.begin(), passed.begin() + 2),
              UnorderedElementsAre("a: rank 1", "b: rank 1"));
  EXPECT_THAT(std::vector(passed.begin() + 2, passed.end()),
              ElementsAre("rank 2 left", "a: rank 4", "b: rank 4"));
}

TEST_F(SubmissionMergerTest, NamesDoNotWaitForEachOther) {
  Submit({1}, a_);
  Submit({1}, b_);
  Submit({2, 4}, b_);
  EXPECT_THAT(Passed(), ElementsAre("b: ranks 1, 2, 4"));
  Submit({2, 4}, a_);
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 1, 2, 4"));
}

TEST_F(SubmissionMergerTest, TimesAndInputsStayWithTheirRanks) {
  for (int rank : {4, 1, 2}) {
    MergedSubmission submission = Of({rank}, a_);
    submission.submitted = {At(rank)};
    submission.inputs = {std::to_string(rank)};
    merger_.Submit(std::move(submission));
  }
  const MergedSubmission merged = PassedOne();
  EXPECT_THAT(merged.ranks, ElementsAre(1, 2, 4));
  EXPECT_THAT(merged.submitted, ElementsAre(At(1), At(2), At(4)));
  EXPECT_THAT(merged.inputs, ElementsAre("1", "2", "4"));
}

TEST_F(SubmissionMergerTest, EqualDescriptionsMayBeSeveralObjects) {
  Submit({1, 2}, a_);
  Submit({4}, Share(Allreduce("a")));
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 1, 2, 4"));
}

TEST_F(SubmissionMergerTest, IdleNamesAreForgottenAndOthersAreNot) {
  Submit({1}, a_);
  Shared invented = Share(Allreduce("invented"));
  const std::weak_ptr<const Description> still_known = invented;
  Submit({1, 2, 4}, invented);
  invented.reset();
  for (int i = 0; i < 5000; ++i) {
    Submit({1, 2, 4}, Share(Allreduce("name" + std::to_string(i))));
  }
  Passed();
  EXPECT_TRUE(still_known.expired());
  EXPECT_TRUE(merger_.anything_waits());
  Submit({2, 4}, a_);
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 1, 2, 4"));
  EXPECT_FALSE(merger_.anything_waits());
}

TEST_F(SubmissionMergerTest, ARanksSecondSubmissionIsOfAnotherRound) {
  Submit({1}, a_);
  Submit({1}, other_a_);
  Submit({2, 4}, a_);
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 1, 2, 4"));
  Submit({2, 4}, other_a_);
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 1, 2, 4"));
}

TEST_F(SubmissionMergerTest, EarlierRoundsGoFirst) {
  Submit({1}, a_);
  // For the leader below, this is both ranks' first one.
  Submit({1, 2}, a_);
  Submit({2}, other_a_);
  EXPECT_THAT(Passed(), IsEmpty());
  Submit({4}, a_);
  Submit({4}, a_);
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 1, 4", "a: ranks 1, 2, 4"));
  Submit({1, 4}, other_a_);
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 1, 2, 4"));
  ExpectMerges(a_);
}

// ---- Different submissions

TEST_F(SubmissionMergerTest, WhatDiffersEndsTheWaitForItsRound) {
  Submit({1}, a_);
  Submit({2}, other_a_);
  EXPECT_THAT(Passed(), ElementsAre("a: rank 1", "a: rank 2"));
  Submit({4}, a_);
  EXPECT_THAT(Passed(), ElementsAre("a: rank 4"));
  ExpectMerges(a_);
}

TEST_F(SubmissionMergerTest, ADuplicateEndsTheWaitForItsRound) {
  Submit({1}, a_);
  SubmitAgain(1, a_);
  EXPECT_THAT(Passed(), ElementsAre("a: rank 1", "a: rank 1"));
  for (int round = 0; round < 2; ++round) {
    Submit({2}, a_);
    EXPECT_THAT(Passed(), ElementsAre("a: rank 2"));
    Submit({4}, a_);
    EXPECT_THAT(Passed(), ElementsAre("a: rank 4"));
  }
  ExpectMerges(a_);
}

TEST_F(SubmissionMergerTest, ADuplicateIsNotMergedEvenIfAllRanksAreThere) {
  Submit({1, 2}, a_);
  SubmitAgain(4, a_);
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 1, 2", "a: rank 4"));
  ExpectMerges(a_);
}

TEST_F(SubmissionMergerTest, LaterRoundsAreHeldWhereAnEarlierOneDiffers) {
  Submit({1}, a_);
  Submit({1}, a_);
  Submit({2}, other_a_);
  EXPECT_THAT(Passed(), ElementsAre("a: rank 1", "a: rank 2"));
  Submit({2}, a_);
  Submit({4}, a_);
  EXPECT_THAT(Passed(), ElementsAre("a: rank 4"));
  Submit({4}, a_);
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 1, 2, 4"));
}

TEST_F(SubmissionMergerTest, TimesAndInputsAreOfAllRanksOrOfNone) {
  MergedSubmission with_time = Of({1}, a_);
  with_time.submitted = {At(1)};
  MergedSubmission with_input = Of({2}, b_);
  with_input.inputs = {"input"};
  merger_.Submit(with_time);
  Submit({4}, a_);
  Submit({1}, b_);
  merger_.Submit(with_input);
  EXPECT_THAT(Passed(),
              ElementsAre("a: rank 1", "a: rank 4", "b: rank 1", "b: rank 2"));
}

// ---- Process sets

TEST_F(SubmissionMergerTest, OnlyTheMembersBelowAreWaitedFor) {
  merger_.AddProcessSet(3, {0, 2, 4});
  const Shared in_set = Share(Allreduce("a", 10, ReduceOp::kSum, 3));
  Submit({1, 2}, a_);
  Submit({4}, in_set);
  EXPECT_THAT(Passed(), IsEmpty());
  Submit({2}, in_set);
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 2, 4"));
  Submit({4}, a_);
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 1, 2, 4"));
}

TEST_F(SubmissionMergerTest, NothingOfAnUnknownSetIsHeld) {
  Submit({2}, Share(Allreduce("a", 10, ReduceOp::kSum, 3)));
  EXPECT_THAT(Passed(), ElementsAre("a: rank 2"));
}

TEST_F(SubmissionMergerTest, NothingOfARankThatIsNotInTheSetIsHeld) {
  merger_.AddProcessSet(3, {0, 2, 4});
  const Shared in_set = Share(Allreduce("a", 10, ReduceOp::kSum, 3));
  Submit({2}, in_set);
  Submit({1}, in_set);
  EXPECT_THAT(Passed(), ElementsAre("a: rank 1"));
  Submit({4}, in_set);
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 2, 4"));
}

TEST_F(SubmissionMergerTest, NothingOfARemovedSetIsHeld) {
  merger_.AddProcessSet(3, {0, 2, 4});
  Submit({1}, a_);
  Submit({2}, Share(Allreduce("a", 10, ReduceOp::kSum, 3)));
  Submit({4}, Share(Allreduce("b", 10, ReduceOp::kSum, 3)));
  merger_.RemoveProcessSet(3);
  EXPECT_THAT(Passed(), UnorderedElementsAre("a: rank 2", "b: rank 4"));
  Submit({4}, Share(Allreduce("a", 10, ReduceOp::kSum, 3)));
  EXPECT_THAT(Passed(), ElementsAre("a: rank 4"));
  Submit({2, 4}, a_);
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 1, 2, 4"));
}

// ---- Agreements

TEST_F(SubmissionMergerTest, AgreementsAreNotMerged) {
  for (int rank : {1, 2, 4}) {
    Submit({rank}, Share(AddSet({1, 2})));
    EXPECT_THAT(Passed(), ElementsAre("sets: rank " + std::to_string(rank)));
  }
}

TEST_F(SubmissionMergerTest, AnAgreementComesAfterWhatWasSubmittedBefore) {
  for (const Description& agreement : {AddSet({1, 2}), RemoveSet({1, 2})}) {
    Submit({1, 2}, a_);
    Submit({1}, b_);
    Submit({1}, Share(agreement));
    const std::vector<std::string> passed = Passed();
    ASSERT_EQ(passed.size(), 3u);
    EXPECT_EQ(passed.back(), "sets: rank 1");
    // The rest of those rounds follows at once. Later submissions are merged again.
    Submit({4}, a_);
    EXPECT_THAT(Passed(), ElementsAre("a: rank 4"));
    Submit({2, 4}, b_);
    EXPECT_THAT(Passed(), ElementsAre("b: ranks 2, 4"));
    ExpectMerges(a_);
    ExpectMerges(b_);
  }
}

TEST_F(SubmissionMergerTest, NothingIsHeldWhileARankHasJoined) {
  Submit({1}, a_);
  Submit({2}, Share(Join()));
  EXPECT_THAT(Passed(), ElementsAre("a: rank 1", "join: rank 2"));
  Submit({4}, a_);
  Submit({4}, b_);
  EXPECT_THAT(Passed(), ElementsAre("a: rank 4", "b: rank 4"));
  Submit({4}, Share(Join()));
  merger_.EndJoin({0, 2});
  Submit({1}, b_);
  EXPECT_THAT(Passed(), ElementsAre("join: rank 4", "b: rank 1"));
  merger_.EndJoin({4, 5});
  // Zeros have stood for the missing submissions.
  ExpectMerges(a_);
  ExpectMerges(b_);
}

TEST_F(SubmissionMergerTest, ARankMayHaveSeveralJoins) {
  Submit({2}, Share(Join()));
  Submit({2}, Share(Join()));
  merger_.EndJoin({2});
  Submit({1}, a_);
  EXPECT_THAT(Passed(), ElementsAre("join: rank 2", "join: rank 2", "a: rank 1"));
  merger_.EndJoin({2});
  ExpectMerges(a_);
}

// ---- Departures

TEST_F(SubmissionMergerTest, ADepartureComesAfterWhatWasSubmittedBefore) {
  Submit({1, 2}, a_);
  merger_.Leave({2});
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 1, 2", "rank 2 left"));
}

TEST_F(SubmissionMergerTest, NothingIsHeldOnceARankHasLeft) {
  Submit({1}, a_);
  merger_.Leave({2});
  Submit({4}, a_);
  Submit({4}, b_);
  EXPECT_THAT(Passed(),
              ElementsAre("a: rank 1", "rank 2 left", "a: rank 4", "b: rank 4"));
}

// ---- Ranks that are late

TEST_F(SubmissionMergerTest, WhatIsOldIsPassedOn) {
  Submit({1}, a_);
  merger_.PassOnOld();
  Submit({2}, a_);
  Submit({2}, b_);
  EXPECT_THAT(Passed(), IsEmpty());
  merger_.PassOnOld();
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 1, 2"));
  merger_.PassOnOld();
  EXPECT_THAT(Passed(), ElementsAre("b: rank 2"));
  merger_.PassOnOld();
  EXPECT_THAT(Passed(), IsEmpty());
}

TEST_F(SubmissionMergerTest, WhatIsPassedOnIsInTheOrderInWhichItCame) {
  std::vector<std::string> in_order;
  for (int i = 0; i < 20; ++i) {
    const Shared description = Share(Allreduce("name " + std::to_string(i)));
    Submit({1}, description);
    in_order.push_back(description->name + ": rank 1");
  }
  merger_.PassOnOld();
  merger_.PassOnOld();
  EXPECT_EQ(Passed(), in_order);
}

TEST_F(SubmissionMergerTest, LateRanksFollowAtOnce) {
  Submit({1}, a_);
  merger_.PassOnOld();
  merger_.PassOnOld();
  EXPECT_THAT(Passed(), ElementsAre("a: rank 1"));
  Submit({1}, a_);
  Submit({2}, a_);
  Submit({2}, a_);
  EXPECT_THAT(Passed(), ElementsAre("a: rank 2"));
  Submit({4}, a_);
  EXPECT_THAT(Passed(), ElementsAre("a: rank 4"));
  Submit({4}, a_);
  EXPECT_THAT(Passed(), ElementsAre("a: ranks 1, 2, 4"));
}

}  // namespace
}  // namespace keras_hvd
