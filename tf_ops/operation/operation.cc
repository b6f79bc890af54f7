#include "tf_ops/operation/operation.h"

#include <numeric>

namespace keras_hvd {

int64_t Operation::input_bytes() const {
  if (!HasOwnRows(description->kind)) return description->bytes();
  int64_t bytes = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    bytes += rows[i] * RowBytes(description->tensors[i]);
  }
  return bytes;
}

int64_t InputBytes(const Batch& batch) {
  int64_t bytes = 0;
  for (const auto& operation : batch) bytes += operation->input_bytes();
  return bytes;
}

void* AllocateResult(Operation* operation, size_t tensor,
                     const std::vector<int64_t>& rows) {
  void* memory = operation->allocate(tensor, rows);
  const int64_t sum = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  operation->out_of_memory |= memory == nullptr && sum > 0;
  operation->buffers[tensor].output = memory;
  operation->allocated_bytes.push_back(
      sum * RowBytes(operation->description->tensors[tensor]));
  return memory;
}

}  // namespace keras_hvd
