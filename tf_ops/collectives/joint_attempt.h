// An attempt that either succeeds on all members of a set or fails on all of them.
//
// The attempt itself may wait for the other members outside the collectives here. A
// member that fails says so at once, and the others then leave that wait. Each member
// finally waits until all have reported their outcome.
#pragma once

#include <cstdint>
#include <vector>

#include "tf_ops/collectives/communicator.h"
#include "tf_ops/collectives/hosts_communicator.h"

namespace keras_hvd {

// For the members of a collective that has begun and has not used its first round.
class CommunicatorAttempt {
 public:
  enum class Outcome : int64_t {
    kSucceeded = 0,
    kLeft = 1,  // because another member failed
    kFailed = 2,
  };

  explicit CommunicatorAttempt(Communicator* communicator)
      : communicator_(*communicator) {}

  // Whether this member already sees that another one has failed.
  bool HasFailedElsewhere() const;
  // Reports this member's outcome and waits for all reports. `*failed` becomes the
  // first member that failed, or -1 if all succeeded. Returns false if the job has
  // failed.
  bool Conclude(Outcome outcome, int* failed);

 private:
  Outcome OutcomeOf(int member) const;

  Communicator& communicator_;
};

// The same for members that may be on several hosts. Each tells all of those on others.
class JointAttempt {
 public:
  using Outcome = CommunicatorAttempt::Outcome;

  explicit JointAttempt(HostsCommunicator* hosts);
  // A member that gives up an attempt before its end gives up the job.
  ~JointAttempt();
  JointAttempt(const JointAttempt&) = delete;
  JointAttempt& operator=(const JointAttempt&) = delete;

  bool HasFailedElsewhere() const;
  bool Conclude(Outcome outcome, int* failed);

 private:
  bool HasFailed(int member) const;

  HostsCommunicator& hosts_;
  CommunicatorAttempt local_;
  Outcome own_ = Outcome::kSucceeded;
  // By member; of those on other hosts.
  std::vector<Outcome> outcomes_;
  std::vector<int64_t> ends_;
  bool concluded_ = false;
};

}  // namespace keras_hvd
