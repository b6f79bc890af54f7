// Which of NCCL's reductions is the one that was asked for, if any.
#ifndef KERAS_HVD_TF_OPS_NCCL_REDUCTION_H_
#define KERAS_HVD_TF_OPS_NCCL_REDUCTION_H_

#include <array>
#include <optional>

#include "tf_ops/collectives/dtype.h"
#include "tf_ops/collectives/reduce.h"
#include "tf_ops/nccl/communicator.h"

namespace keras_hvd::nccl {

Type TypeOf(DataType dtype);

// What all members of a communicator have: the least of what each one has.
struct Capabilities {
  int version = kOldestVersion;  // of NCCL
  int compute_capability = 0;    // of the GPUs; 90 for 9.0
};

// Whether NCCL has the reduction for the type, over so many members, with a result that
// differs from the CPU's by no more than the order of a sum does: no integer averages
// or scales, no scales of minima, maxima and products, none of 8- and 16-bit floats
// that have no such number, no minima and maxima of floats (it leaves NaNs out), and no
// Adasum. Its own average, which it has of every type, rounds 1/count to the type: a
// little of 16-bit floats, too much of 8-bit ones.
bool CanReduce(const Reduction& reduction, DataType dtype, int count,
               const Capabilities& capabilities);

// An op for one call within a group of the communicator; it lives until the group has
// been enqueued.
class ScopedOp {
 public:
  ScopedOp() = default;
  static Status Make(const Reduction& reduction, DataType dtype,
                     Communicator* communicator, ScopedOp* op);
  ~ScopedOp();
  ScopedOp(ScopedOp&& other) noexcept;
  ScopedOp& operator=(ScopedOp&& other) noexcept;

  Op op() const { return op_; }

 private:
  Communicator* communicator_ = nullptr;  // null: the op was not made
  Op op_ = kSum;
};

// Those of all types of a group.
class ScopedOps {
 public:
  explicit ScopedOps(const Reduction& reduction) : reduction_(reduction) {}
  // To be called before the group: NCCL makes no op while another call is in progress.
  Status Add(DataType dtype, Communicator* communicator);
  // Of a type that was added.
  Op Of(DataType dtype) const { return ops_[static_cast<int>(dtype)]->op(); }

 private:
  const Reduction reduction_;
  std::array<std::optional<ScopedOp>, kReducedDataTypes> ops_;
};

}  // namespace keras_hvd::nccl

#endif  // KERAS_HVD_TF_OPS_NCCL_REDUCTION_H_
