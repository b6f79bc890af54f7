#include "tf_ops/gpu/gpu_access.h"

#include <algorithm>

namespace keras_hvd {

GpuSupport FindGpuSupport(const GpuLibraries& libraries) {
  GpuSupport support;
  std::shared_ptr<const cuda::Driver> driver;
  const Status cuda = cuda::Driver::Open(libraries.cuda, &driver);
  if (cuda.ok() &&
      driver->functions().device_count(&support.devices) != cuda::Result::kSuccess) {
    support.devices = 0;
  }
  // Works without a GPU too: an image may be built on one machine for another.
  std::shared_ptr<const nccl::Library> library;
  const Status nccl = nccl::Library::Open(libraries.nccl, &library);
  // One line for each.
  support.text = cuda.ok() ? driver->text() : cuda.message;
  support.text += '\n' + (nccl.ok() ? library->text() : nccl.message);
  if (nccl.ok()) support.nccl_version = library->version();
  return support;
}

Status GpuAccess::OpenFor(cuda::Stream stream, std::shared_ptr<cuda::Gpu>* gpu) {
  if (stream == cuda::kStreamPerThread) {
    return Status::InvalidArgument(
        "CU_STREAM_PER_THREAD is another stream in each thread, also in those of "
        "keras_hvd; tensors on GPUs need a stream of their own, or NULL");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (streams_.count(stream) != 0) {
    *gpu = gpu_;
    return Status::Ok();
  }
  KHVD_RETURN_IF_ERROR(OpenDriver());
  int ordinal;
  KHVD_RETURN_IF_ERROR(cuda::Gpu::DeviceOf(*driver_, stream, &ordinal));
  KHVD_RETURN_IF_ERROR(OpenDevice(ordinal));
  if (gpu_->ordinal() != ordinal) {
    return Status::InvalidArgument(
        "a rank uses one GPU: this one's tensors were on device " +
        std::to_string(gpu_->ordinal()) + ", and now there is one on device " +
        std::to_string(ordinal) +
        ". Have each rank see one device only, or place the tensor there");
  }
  // The default stream belongs to whichever context is current.
  if (stream != nullptr) streams_.insert(stream);
  *gpu = gpu_;
  return Status::Ok();
}

Status GpuAccess::Open(std::shared_ptr<cuda::Gpu>* gpu) {
  std::lock_guard<std::mutex> lock(mutex_);
  Status status = OpenDriver();
  if (status.ok() && gpu_ == nullptr) {
    // Follows TensorFlow's settings: each rank may see only one device, whatever its
    // place on the host, or there may be more ranks than devices.
    int count = 0;
    status = driver_->Check((*driver_)->device_count(&count), "cuDeviceGetCount");
    if (status.ok()) status = OpenDevice(local_rank_ % std::max(count, 1));
  }
  if (status.ok()) *gpu = gpu_;
  return status;
}

Status GpuAccess::OpenNccl(std::shared_ptr<const nccl::Library>* library) {
  return nccl::Library::Open(libraries_.nccl, library);
}

Status GpuAccess::OpenDriver() {
  if (driver_ != nullptr) return Status::Ok();
  return cuda::Driver::Open(libraries_.cuda, &driver_);
}

Status GpuAccess::OpenDevice(int ordinal) {
  if (gpu_ != nullptr) return Status::Ok();
  return cuda::Gpu::Open(driver_, ordinal, &gpu_);
}

}  // namespace keras_hvd
