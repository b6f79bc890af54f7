// How a reduction across hosts is divided into stages.
//
// Each host's members are reduced first, in the order of their ranks, and then the
// hosts, in the order of their numbers. Narrow floats are rounded as they leave a host
// and at the end. If each host has only one member, there is only the second stage: all
// is scaled, reduced and rounded as on one host.
#ifndef KERAS_HVD_TF_OPS_COLLECTIVES_HOSTS_REDUCTION_H_
#define KERAS_HVD_TF_OPS_COLLECTIVES_HOSTS_REDUCTION_H_

#include "tf_ops/collectives/hosts_communicator.h"
#include "tf_ops/collectives/reduce.h"

namespace keras_hvd {

struct StagedReduction {
  Reduction of_host;
  Reduction of_hosts;
};

inline bool HaveOneMemberEach(const HostsCommunicator& hosts) {
  return hosts.count() == hosts.hosts();
}

inline StagedReduction StagesOf(const Reduction& whole,
                                const HostsCommunicator& hosts) {
  if (HaveOneMemberEach(hosts)) return {{}, whole};
  const bool averages = whole.op == ReduceOp::kAverage;
  const ReduceOp op = averages ? ReduceOp::kSum : whole.op;
  return {{op, whole.prescale, 1},
          {op, 1, averages ? whole.postscale / hosts.count() : whole.postscale}};
}

// Whether the stages give the right result. What leaves a host has the tensor's type:
// averages and scaled sums of integers may not fit, and need all members' elements.
inline bool HasStages(const Reduction& whole, DataType dtype,
                      const HostsCommunicator& hosts) {
  const bool fits =
      whole.op != ReduceOp::kAverage && whole.prescale == 1 && whole.postscale == 1;
  return fits || !IsInteger(dtype) || HaveOneMemberEach(hosts);
}

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COLLECTIVES_HOSTS_REDUCTION_H_
