// See joint_attempt.h.
#include "tf_ops/collectives/joint_attempt.h"

#include <cstring>

namespace keras_hvd {

bool CommunicatorAttempt::HasFailedElsewhere() const {
  for (int member = 0; member < communicator_.count(); ++member) {
    if (!communicator_.HasPublished(member)) continue;
    if (OutcomeOf(member) == Outcome::kFailed) return true;
  }
  return false;
}

bool CommunicatorAttempt::Conclude(Outcome outcome, int* failed) {
  memcpy(communicator_.ExchangeMemory(communicator_.index()), &outcome,
         sizeof(outcome));
  communicator_.Publish();
  if (!communicator_.AwaitAllPublished()) return false;
  *failed = -1;
  for (int member = communicator_.count() - 1; member >= 0; --member) {
    if (OutcomeOf(member) == Outcome::kFailed) *failed = member;
  }
  return true;
}

JointAttempt::Outcome CommunicatorAttempt::OutcomeOf(int member) const {
  Outcome outcome;
  memcpy(&outcome, communicator_.ExchangeMemory(member), sizeof(outcome));
  return outcome;
}

}  // namespace keras_hvd
