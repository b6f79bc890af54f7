// See reducescatter.h.
#include "tf_ops/collectives/reducescatter.h"

#include <utility>

#include "tf_ops/collectives/parts.h"

namespace keras_hvd {

bool Reducescatter(const ReducescatterOptions& options, Communicator* communicator) {
  const StandardFloatingPoint floating_point;
  const int members = communicator->count();
  std::vector<std::vector<int64_t>> starts;
  std::vector<const void*> inputs;
  for (const ReducescatterTensor& tensor : options.tensors) {
    std::vector<int64_t>& parts = starts.emplace_back();
    for (int member = 0; member <= members; ++member) {
      parts.push_back(PartStart(tensor.rows, member, members) * tensor.row_elements *
                      Bytes(tensor.dtype));
    }
    inputs.push_back(tensor.input);
  }
  return Scatter(
      Parts(std::move(starts)), inputs, communicator,
      [&](size_t number, int64_t offset, int64_t bytes, const void* const* stretches) {
        const ReducescatterTensor& tensor = options.tensors[number];
        Reduce(options.reduction, tensor.dtype, stretches, members,
               bytes / Bytes(tensor.dtype), static_cast<char*>(tensor.output) + offset);
      });
}

}  // namespace keras_hvd
