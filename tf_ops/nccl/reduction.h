// Finds the NCCL reduction that matches the requested one, if any.
#pragma once

#include <array>
#include <optional>
#include <vector>

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

// The ops for all types in one group of calls. They live until it has been enqueued.
class ScopedOps {
 public:
  explicit ScopedOps(const Reduction& reduction) : reduction_(reduction) {}
  ~ScopedOps();
  ScopedOps(const ScopedOps&) = delete;
  ScopedOps& operator=(const ScopedOps&) = delete;

  // Call it before the group: NCCL makes no op while another call is in progress.
  Status Add(DataType dtype, Communicator* communicator);
  // The op for a type that was added.
  Op Of(DataType dtype) const { return *ops_[static_cast<int>(dtype)]; }

 private:
  const Reduction reduction_;
  std::array<std::optional<Op>, kReducedDataTypes> ops_;
  Communicator* communicator_ = nullptr;  // of those made
  std::vector<Op> made_;
};

}  // namespace keras_hvd::nccl
