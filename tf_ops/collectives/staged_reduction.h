// How a reduction over several hosts is divided into stages.
//
// Each host's members are reduced first, in the order of their ranks, and then the
// hosts. 8- and 16-bit floats are rounded as they leave a host and at the end.
// Reductions whose sums are wider than the type meanwhile take the hosts in the order
// of their numbers. All others take them in pairs: the sum of the first hosts, as many
// of them as the largest power of two below their number, and the sum of the others,
// each made in the same way. So it does not matter where sums of some hosts are made,
// and how large the messages are. If each host has only one member, there is only the
// second stage.
#pragma once

#include <cstdint>
#include <vector>

#include "tf_ops/collectives/reduce.h"

namespace keras_hvd {

class StagedReduction {
 public:
  StagedReduction(const Reduction& whole, int members, int hosts)
      : whole_(whole), members_(members), one_each_(members == hosts) {}

  // Whether a host with only one member sends that member's input as it is.
  bool keeps_inputs() const {
    return one_each_ || (whole_.prescale == 1 && !averages());
  }
  // Whether the stages give the right result. A host sends elements of the tensor's
  // type. Averages and scaled sums of integers may not fit it, and need all members'
  // elements.
  bool Suits(DataType dtype) const {
    return one_each_ || IsFloating(dtype) || PairsHosts(dtype);
  }

  // Whether the hosts are taken in pairs: the sum of two has the tensor's type.
  bool PairsHosts(DataType dtype) const {
    if (IsFloating(dtype)) return Bytes(dtype) >= 4;
    const bool unscaled = whole_.prescale == 1 && whole_.postscale == 1;
    return !IsInteger(dtype) || (unscaled && !averages());
  }

  Reduction OfHost(DataType dtype) const;
  // The second stage, over the hosts' sums in the order of their numbers. `result` may
  // be one of the inputs.
  void ReduceHosts(DataType dtype, const void* const* inputs, int hosts,
                   int64_t elements, void* result) const;

  // ---- Its steps, where PairsHosts: the factor for a host's sum before, and the
  // pairs, the last of which makes the result.
  double BeforePairs() const { return one_each_ ? whole_.prescale : 1; }
  // The first stage, with that factor in it.
  Reduction OfHostForPairs(DataType dtype) const {
    return one_each_ ? Reduction{ReduceOp::kSum, whole_.prescale} : OfHost(dtype);
  }
  Reduction OfPair() const { return {averages() ? ReduceOp::kSum : whole_.op}; }
  Reduction OfLastPair() const;

 private:
  Reduction OfHosts(DataType dtype) const;
  bool averages() const { return whole_.op == ReduceOp::kAverage; }
  // A host's sum may exceed the range of a narrow float, though the average fits.
  bool DividesEarly(DataType dtype) const { return averages() && Bytes(dtype) < 4; }

  const Reduction whole_;
  const int members_;
  const bool one_each_;
};

// The same bits as from a collective over several hosts. `hosts` are the numbers of the
// inputs' hosts; none if all are of one.
void ReduceInStages(const Reduction& whole, DataType dtype,
                    const std::vector<const void*>& inputs,
                    const std::vector<int>& hosts, int64_t elements, void* result);

}  // namespace keras_hvd
