// See operation.h.
#include "tf_ops/engine/operation.h"

namespace keras_hvd {

int64_t Operation::input_bytes() const {
  if (!HasOwnRows(description->kind)) return description->bytes();
  int64_t bytes = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    bytes += rows[i] * RowBytes(description->tensors[i]);
  }
  return bytes;
}

}  // namespace keras_hvd
