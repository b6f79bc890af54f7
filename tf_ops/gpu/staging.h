// Memory that a rank needs for a while to run collectives of tensors on a GPU, kept for
// the next time: to get some takes longer than most collectives.
#ifndef KERAS_HVD_TF_OPS_GPU_STAGING_H_
#define KERAS_HVD_TF_OPS_GPU_STAGING_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "tf_ops/cuda/gpu.h"

namespace keras_hvd {

class Staging {
 public:
  // Memory of at least so many bytes; nothing is enqueued with it any more.
  Status Take(const std::shared_ptr<cuda::Gpu>& gpu, cuda::Memory::Space space,
              size_t bytes, cuda::Memory* memory);
  // Takes back what has been taken; all that was enqueued with it has passed.
  void GiveBack(cuda::Memory memory);
  void Clear() { free_.clear(); }
  // The same where memory cannot be freed any more.
  void Abandon();

 private:
  std::vector<cuda::Memory> free_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_GPU_STAGING_H_
