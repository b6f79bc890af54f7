#include "tf_ops/collectives/allgather.h"

#include <utility>

#include "tf_ops/collectives/allgather_values.h"
#include "tf_ops/collectives/hosts_parts.h"
#include "tf_ops/collectives/parts.h"

namespace keras_hvd {

template <typename Group>
bool Allgather(const AllgatherOptions& options, Group* communicator) {
  // The members' first dimensions travel in separate rounds, because results cannot be
  // allocated before they are known.
  std::vector<int64_t> own_rows;
  for (const AllgatherTensor& tensor : options.tensors) own_rows.push_back(tensor.rows);
  std::vector<std::vector<int64_t>> all_rows;
  if (!AllgatherValues(own_rows, communicator, &all_rows)) return false;

  std::vector<std::vector<int64_t>> starts;
  std::vector<const void*> inputs;
  std::vector<void*> results;
  for (size_t i = 0; i < options.tensors.size(); ++i) {
    const AllgatherTensor& tensor = options.tensors[i];
    std::vector<int64_t> rows;
    std::vector<int64_t> parts = {0};
    for (const std::vector<int64_t>& of_member : all_rows) {
      rows.push_back(of_member[i]);
      parts.push_back(parts.back() + of_member[i] * tensor.row_bytes);
    }
    starts.push_back(std::move(parts));
    inputs.push_back(tensor.input);
    results.push_back(tensor.allocate(rows));
  }
  if (!communicator->NextRound()) return false;
  return Gather(Parts(std::move(starts)), inputs, communicator, results);
}

template bool Allgather(const AllgatherOptions&, Communicator*);
template bool Allgather(const AllgatherOptions&, HostsCommunicator*);

}  // namespace keras_hvd
