// Something that each member of a set tries, and that all of them have in the end, or
// none.
//
// To try may mean to wait for the others, outside of any collective here. A member that
// has failed says so at once, and the others leave that wait; each then waits until all
// have told how it went.
#ifndef KERAS_HVD_TF_OPS_COLLECTIVES_JOINT_ATTEMPT_H_
#define KERAS_HVD_TF_OPS_COLLECTIVES_JOINT_ATTEMPT_H_

#include "tf_ops/collectives/communicator.h"

namespace keras_hvd {

class JointAttempt {
 public:
  enum class Outcome : int64_t {
    kSucceeded = 0,
    kLeft = 1,  // for another one's failure
    kFailed = 2,
  };

  virtual ~JointAttempt() = default;

  // Whether a member has failed, so far as this one can see.
  virtual bool HasFailedElsewhere() const = 0;
  // Tells how it went here, and waits until all have told. `*failed` becomes the first
  // member that has failed; -1: all have succeeded. Returns false if the job has
  // failed.
  virtual bool Conclude(Outcome outcome, int* failed) = 0;
};

// Of the members of a collective that has begun, and whose first round is free.
class CommunicatorAttempt final : public JointAttempt {
 public:
  explicit CommunicatorAttempt(Communicator* communicator)
      : communicator_(*communicator) {}

  bool HasFailedElsewhere() const override;
  bool Conclude(Outcome outcome, int* failed) override;

 private:
  Outcome OutcomeOf(int member) const;

  Communicator& communicator_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COLLECTIVES_JOINT_ATTEMPT_H_
