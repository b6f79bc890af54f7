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

CommunicatorAttempt::Outcome CommunicatorAttempt::OutcomeOf(int member) const {
  Outcome outcome;
  memcpy(&outcome, communicator_.ExchangeMemory(member), sizeof(outcome));
  return outcome;
}

JointAttempt::JointAttempt(HostsCommunicator* hosts)
    : hosts_(*hosts),
      local_(&hosts->local()),
      outcomes_(hosts->count(), Outcome::kSucceeded),
      ends_(hosts->count(), 0) {
  for (int step = 1; step < hosts_.hosts(); ++step) {
    for (int member : hosts_.members_of(hosts_.host_after(step))) {
      ends_[member] =
          hosts_.Receive(member, &outcomes_[member], sizeof(outcomes_[member]));
    }
  }
}

JointAttempt::~JointAttempt() {
  if (!concluded_) hosts_.Abandon();
}

bool JointAttempt::HasFailedElsewhere() const {
  hosts_.Progress();
  for (int member = 0; member < hosts_.count(); ++member) {
    if (HasFailed(member)) return true;
  }
  return local_.HasFailedElsewhere();
}

bool JointAttempt::Conclude(Outcome outcome, int* failed) {
  own_ = outcome;
  for (int step = 1; step < hosts_.hosts(); ++step) {
    for (int member : hosts_.members_of(hosts_.host_after(step))) {
      hosts_.Send(member, &own_, sizeof(own_));
    }
  }
  int failed_here;
  if (!local_.Conclude(outcome, &failed_here)) return false;
  if (!hosts_.AwaitReceived() || !hosts_.AwaitSent()) return false;
  concluded_ = true;
  *failed = failed_here < 0 ? -1 : hosts_.members_of(hosts_.host())[failed_here];
  for (int member = hosts_.count() - 1; member >= 0; --member) {
    if (HasFailed(member) && (*failed < 0 || member < *failed)) *failed = member;
  }
  return true;
}

bool JointAttempt::HasFailed(int member) const {
  if (hosts_.host_of(member) == hosts_.host()) return false;
  return hosts_.received(member) >= ends_[member] &&
         outcomes_[member] == Outcome::kFailed;
}

}  // namespace keras_hvd
