// Attempts of all members: they end alike, and nobody waits for one that has failed.
#include "tf_ops/collectives/joint_attempt.h"

#include <gtest/gtest.h>

#include "tf_ops/collectives/testing.h"

namespace keras_hvd {
namespace {

using Outcome = JointAttempt::Outcome;

class JointAttemptTest : public testing::TestWithParam<int> {};

TEST_P(JointAttemptTest, SucceedsWhereAllDo) {
  Ranks ranks(GetParam());
  ranks.Run([](int, Communicator* communicator) {
    CommunicatorAttempt attempt(communicator);
    int failed = 0;
    EXPECT_TRUE(attempt.Conclude(Outcome::kSucceeded, &failed));
    EXPECT_EQ(failed, -1);
    EXPECT_FALSE(attempt.HasFailedElsewhere());
  });
}

TEST_P(JointAttemptTest, HasTheOthersLeaveWhereOneHasFailed) {
  for (int failing = 0; failing < GetParam(); ++failing) {
    Ranks ranks(GetParam());
    // The second one's memory has the first one's outcomes in it.
    for (int time = 0; time < 4; ++time) {
      ranks.Run([failing](int rank, Communicator* communicator) {
        CommunicatorAttempt attempt(communicator);
        // The last one has succeeded before it could hear of the failure.
        const bool waits = rank != failing && rank != communicator->count() - 1;
        while (waits && !attempt.HasFailedElsewhere()) sched_yield();
        Outcome outcome = waits ? Outcome::kLeft : Outcome::kSucceeded;
        if (rank == failing) outcome = Outcome::kFailed;
        int failed = -1;
        EXPECT_TRUE(attempt.Conclude(outcome, &failed));
        EXPECT_EQ(failed, failing);
      });
      ranks.Run([](int, Communicator* communicator) {
        CommunicatorAttempt attempt(communicator);
        EXPECT_FALSE(attempt.HasFailedElsewhere());
        int failed = 0;
        EXPECT_TRUE(attempt.Conclude(Outcome::kSucceeded, &failed));
        EXPECT_EQ(failed, -1);
      });
    }
  }
}

TEST_P(JointAttemptTest, TheFirstOfSeveralThatHaveFailedIsKnownToAll) {
  Ranks ranks(GetParam());
  ranks.Run([](int rank, Communicator* communicator) {
    CommunicatorAttempt attempt(communicator);
    const bool succeeds = rank == 0 && communicator->count() > 1;
    int failed = -1;
    EXPECT_TRUE(
        attempt.Conclude(succeeds ? Outcome::kSucceeded : Outcome::kFailed, &failed));
    EXPECT_EQ(failed, communicator->count() > 1 ? 1 : 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, JointAttemptTest, testing::Range(1, 5));

}  // namespace
}  // namespace keras_hvd
