// The libraries for tensors on GPUs, and this rank's GPU. Both are opened when the
// first such tensor comes, so a job without one needs neither.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "tf_ops/cuda/gpu.h"
#include "tf_ops/nccl/library.h"

namespace keras_hvd {

// "" means the system's library.
struct GpuLibraries {
  std::string cuda;
  std::string nccl;
};

// The features of `libraries`, for people and programs; see khvd_gpu_support.
struct GpuSupport {
  int devices = 0;
  int nccl_version = 0;
  std::string text;
};
GpuSupport FindGpuSupport(const GpuLibraries& libraries);

// Any thread may call all of it.
class GpuAccess {
 public:
  // `local_rank`: the device number to use when no stream determines it.
  GpuAccess(GpuLibraries libraries, int local_rank)
      : libraries_(std::move(libraries)), local_rank_(local_rank) {}

  // The GPU of a caller's stream, which must be the same for all of a rank's tensors.
  Status OpenFor(cuda::Stream stream, std::shared_ptr<cuda::Gpu>* gpu);
  // The GPU already opened; for a rank without a tensor of its own, the rank's GPU.
  Status Open(std::shared_ptr<cuda::Gpu>* gpu);
  Status OpenNccl(std::shared_ptr<const nccl::Library>* library);

 private:
  Status OpenDriver();
  Status OpenDevice(int ordinal);

  const GpuLibraries libraries_;
  const int local_rank_;
  std::mutex mutex_;
  // mutex_ guards everything below.
  std::shared_ptr<const cuda::Driver> driver_;
  std::shared_ptr<cuda::Gpu> gpu_;
  // Streams known to be the GPU's: asking takes as long as a small collective.
  std::set<cuda::Stream> streams_;
};

}  // namespace keras_hvd
