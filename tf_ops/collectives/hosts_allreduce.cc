// See allreduce.h.
//
// The way in which the hosts exchange their sums depends on their number, the size and
// the types: see hosts_reducer.h.
#include <vector>

#include "tf_ops/collectives/hosts_parts.h"
#include "tf_ops/collectives/hosts_reducer.h"

namespace keras_hvd {
namespace {

// For tensors that cannot be reduced in stages: all members' elements travel to one of
// them.
bool AllreduceWhole(const AllreduceOptions& options, HostsCommunicator* hosts) {
  const int members = hosts->count();
  std::vector<std::vector<int64_t>> starts;
  std::vector<const void*> inputs, own;
  std::vector<void*> outputs;
  for (const AllreduceTensor& tensor : options.tensors) {
    starts.push_back(PartStarts(tensor.elements, Bytes(tensor.dtype), members));
    inputs.push_back(tensor.input);
    outputs.push_back(tensor.output);
    own.push_back(Output(tensor, starts.back()[hosts->index()]));
  }
  const Parts parts(starts);
  const bool scattered = Scatter(
      parts, inputs, hosts,
      [&](size_t number, int64_t offset, int64_t bytes, const void* const* stretches) {
        const AllreduceTensor& tensor = options.tensors[number];
        Reduce(options.reduction, tensor.dtype, stretches, members,
               bytes / Bytes(tensor.dtype),
               Output(tensor, starts[number][hosts->index()] + offset));
      });
  return scattered && hosts->NextRound() && Gather(parts, own, hosts, outputs);
}

}  // namespace

bool Allreduce(const AllreduceOptions& options, HostsCommunicator* hosts) {
  const StandardFloatingPoint floating_point;
  const StagedReduction stages(options.reduction, hosts->count(), hosts->hosts());
  AllreduceOptions staged = options, whole = options;
  staged.tensors.clear();
  whole.tensors.clear();
  for (const AllreduceTensor& tensor : options.tensors) {
    const bool has_stages = stages.Suits(tensor.dtype);
    (has_stages ? staged : whole).tensors.push_back(tensor);
  }
  const bool halves = SuitHalving(staged, *hosts);
  if (!(halves ? AllreduceByHalving : AllreduceDirectly)(staged, hosts)) return false;
  return whole.tensors.empty() || (hosts->local().Regroup() && hosts->NextRound() &&
                                   AllreduceWhole(whole, hosts));
}

}  // namespace keras_hvd
