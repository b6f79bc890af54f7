// Finds the NCCL reduction that matches the requested one, if any.
#pragma once

#include <array>
#include <optional>

#include "tf_ops/collectives/dtype.h"
#include "tf_ops/collectives/reduce.h"
#include "tf_ops/nccl/communicator.h"

namespace keras_hvd::nccl {

Type TypeOf(DataType dtype);

// The capabilities that all members of a communicator have: the minimum over them.
struct Capabilities {
  int version = kOldestVersion;  // of NCCL
  int compute_capability = 0;    // of the GPUs; 90 for 9.0
};

// Whether NCCL can do the reduction for the type and number of members, with a result
// that differs from the CPU's no more than the order of a sum may change it. This
// excludes integer averages and scales; scales of minima, maxima and products; scales
// that an 8- or 16-bit float type cannot represent; minima and maxima of floats (NCCL
// ignores NaNs); and Adasum. NCCL has its own average for every type, but rounds
// 1/count to the type: a small error for 16-bit floats, too large for 8-bit ones.
bool CanReduce(const Reduction& reduction, DataType dtype, int count,
               const Capabilities& capabilities);

// An op for one call within a group of the communicator. It lives until the group has
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

// The ops for all types in a group.
class ScopedOps {
 public:
  explicit ScopedOps(const Reduction& reduction) : reduction_(reduction) {}
  // Call it before the group: NCCL makes no op while another call is in progress.
  Status Add(DataType dtype, Communicator* communicator);
  // The op for a type that was added.
  Op Of(DataType dtype) const { return ops_[static_cast<int>(dtype)]->op(); }

 private:
  const Reduction reduction_;
  std::array<std::optional<ScopedOp>, kReducedDataTypes> ops_;
};

}  // namespace keras_hvd::nccl
