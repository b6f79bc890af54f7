// See staged_reduction.h.
#include "tf_ops/collectives/staged_reduction.h"

#include <algorithm>
#include <map>
#include <memory>

namespace keras_hvd {

Reduction StagedReduction::OfHost(DataType dtype) const {
  if (one_each_) return {};
  return {averages() ? ReduceOp::kSum : whole_.op, whole_.prescale,
          DividesEarly(dtype) ? 1.0 / members_ : 1};
}

Reduction StagedReduction::OfHosts(DataType dtype) const {
  if (one_each_) return whole_;
  const bool divides = averages() && !DividesEarly(dtype);
  return {averages() ? ReduceOp::kSum : whole_.op, 1,
          divides ? whole_.postscale / members_ : whole_.postscale};
}

void ReduceInStages(const Reduction& whole, DataType dtype,
                    const std::vector<const void*>& inputs,
                    const std::vector<int>& hosts, int64_t elements, void* result) {
  const bool is_one_host = std::all_of(hosts.begin(), hosts.end(),
                                       [&](int host) { return host == hosts[0]; });
  if (is_one_host) {
    return Reduce(whole, dtype, inputs.data(), static_cast<int>(inputs.size()),
                  elements, result);
  }
  std::map<int, std::vector<const void*>> of_hosts;
  for (size_t i = 0; i < inputs.size(); ++i) of_hosts[hosts[i]].push_back(inputs[i]);
  const StagedReduction stages(whole, static_cast<int>(inputs.size()),
                               static_cast<int>(of_hosts.size()));
  if (!stages.Suits(dtype)) {
    return Reduce(whole, dtype, inputs.data(), static_cast<int>(inputs.size()),
                  elements, result);
  }
  const int64_t bytes = elements * Bytes(dtype);
  std::vector<std::unique_ptr<char[]>> sums;
  std::vector<const void*> left;
  for (const auto& [host, of_host] : of_hosts) {
    sums.emplace_back(new char[bytes]);
    left.push_back(sums.back().get());
    Reduce(stages.OfHost(dtype), dtype, of_host.data(),
           static_cast<int>(of_host.size()), elements, sums.back().get());
  }
  Reduce(stages.OfHosts(dtype), dtype, left.data(), static_cast<int>(left.size()),
         elements, result);
}

}  // namespace keras_hvd
