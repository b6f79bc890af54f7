// Temporary memory that a rank needs to run collectives of GPU tensors. It is kept for
// the next time, because allocation takes longer than most collectives.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "tf_ops/cuda/gpu.h"

namespace keras_hvd {

class Staging {
 public:
  // Memory of at least `bytes` bytes, with nothing enqueued on it any more.
  Status Take(const std::shared_ptr<cuda::Gpu>& gpu, cuda::Memory::Space space,
              size_t bytes, cuda::Memory* memory);
  // Takes back memory. Everything enqueued with it must have run.
  void GiveBack(cuda::Memory memory);
  void Clear() { free_.clear(); }
  // The same when memory cannot be freed any more.
  void Abandon();

 private:
  std::vector<cuda::Memory> free_;
};

}  // namespace keras_hvd
