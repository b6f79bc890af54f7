#include "tf_ops/cuda/gpu.h"

#include <utility>

namespace keras_hvd::cuda {
namespace {

Status DeviceOfContext(const Driver& driver, Context context, Device* device) {
  KHVD_RETURN_IF_ERROR(driver.Check(driver->push_context(context), "cuCtxPushCurrent"));
  Status status = driver.Check(driver->context_device(device), "cuCtxGetDevice");
  Context popped;
  Status back = driver.Check(driver->pop_context(&popped), "cuCtxPopCurrent");
  return status.ok() ? back : status;
}

Status IsPrimary(const Driver& driver, Context context, Device device, bool* primary) {
  Context retained = nullptr;
  KHVD_RETURN_IF_ERROR(driver.Check(driver->retain_primary_context(&retained, device),
                                    "cuDevicePrimaryCtxRetain"));
  *primary = retained == context;
  return driver.Check(driver->release_primary_context(device),
                      "cuDevicePrimaryCtxRelease");
}

// The GPU whose context this project's code has made current on the thread.
thread_local const Gpu* current_gpu = nullptr;

Status CreateStream(const Driver& driver, int priority, Stream* stream) {
  Status status =
      driver.Check(driver->create_stream(stream, kStreamNonBlocking, priority),
                   "cuStreamCreateWithPriority");
  if (!status.ok()) *stream = nullptr;
  return status;
}

}  // namespace

Status Gpu::Open(std::shared_ptr<const Driver> driver, int ordinal,
                 std::shared_ptr<Gpu>* gpu) {
  std::shared_ptr<Gpu> opened(new Gpu(std::move(driver), ordinal));
  Status status = opened->Start();
  if (status.ok()) *gpu = std::move(opened);
  return status;
}

Status Gpu::Start() {
  const Driver& driver = *driver_;
  KHVD_RETURN_IF_ERROR(driver.Check(driver->device(&device_, ordinal_), "cuDeviceGet"));
  KHVD_RETURN_IF_ERROR(
      driver.Check(driver->device_uuid(&uuid_, device_), "cuDeviceGetUuid"));
  KHVD_RETURN_IF_ERROR(ReadCapability());
  Status status = driver.Check(driver->retain_primary_context(&context_, device_),
                               "cuDevicePrimaryCtxRetain");
  if (!status.ok()) {
    context_ = nullptr;
    return status;
  }
  const Current current(*this);
  if (!current.status().ok()) return current.status();
  int least = 0, greatest = 0;
  KHVD_RETURN_IF_ERROR(driver.Check(driver->stream_priorities(&least, &greatest),
                                    "cuCtxGetStreamPriorityRange"));
  return CreateStream(driver, greatest, &stream_);
}

Status Gpu::OpenIdleStream(Stream* stream) {
  const Current current(*this);
  Status status = current.status();
  std::lock_guard lock(mutex_);
  if (status.ok() && idle_stream_ == nullptr) {
    status = CreateStream(*driver_, 0, &idle_stream_);
  }
  *stream = idle_stream_;
  return status;
}

Status Gpu::ReadCapability() {
  int major = 0, minor = 0;
  KHVD_RETURN_IF_ERROR(
      driver_->Check((*driver_)->device_attribute(&major, kCapabilityMajor, device_),
                     "cuDeviceGetAttribute"));
  const Status status =
      driver_->Check((*driver_)->device_attribute(&minor, kCapabilityMinor, device_),
                     "cuDeviceGetAttribute");
  compute_capability_ = 10 * major + minor;
  return status;
}

// Failures here are ignored: at the end of the process the driver may already be gone.
Gpu::~Gpu() {
  if (context_ == nullptr) return;
  const Driver& driver = *driver_;
  if (const Current current(*this); current.status().ok()) {
    for (const Timing timing : {Timing::kOff, Timing::kOn}) {
      for (Event event : FreeEvents(timing)) driver->destroy_event(event);
    }
    for (Stream stream : {stream_, idle_stream_}) {
      if (stream != nullptr) driver->destroy_stream(stream);
    }
  }
  driver->release_primary_context(device_);
}

Status Gpu::DeviceOf(const Driver& driver, Stream stream, int* ordinal) {
  Context context = nullptr;
  KHVD_RETURN_IF_ERROR(
      driver.Check(driver->stream_context(stream, &context), "cuStreamGetCtx"));
  Device device = 0;
  KHVD_RETURN_IF_ERROR(DeviceOfContext(driver, context, &device));
  bool primary = false;
  KHVD_RETURN_IF_ERROR(IsPrimary(driver, context, device, &primary));
  if (!primary) {
    return Status::InvalidArgument(
        "the stream is of a context of its own on GPU " + std::to_string(device) +
        "; tensors on GPUs need one of the device's primary context");
  }
  *ordinal = device;
  return Status::Ok();
}

Gpu::Current::Current(const Gpu& gpu)
    : gpu_(gpu),
      outer_(current_gpu),
      status_(outer_ == &gpu
                  ? Status::Ok()
                  : gpu.driver().Check(gpu.driver()->push_context(gpu.context_),
                                       "cuCtxPushCurrent")) {
  if (status_.ok()) current_gpu = &gpu;
}

// Popping after a failed push would remove one of the caller's contexts.
Gpu::Current::~Current() {
  if (outer_ == &gpu_ || !status_.ok()) return;
  current_gpu = outer_;
  Context popped;
  gpu_.driver()->pop_context(&popped);
}

Status Gpu::Record(Stream stream, Event* event, Timing timing) {
  const Current current(*this);
  KHVD_RETURN_IF_ERROR(current.status());
  KHVD_RETURN_IF_ERROR(TakeEvent(event, timing));
  Status status =
      driver_->Check((*driver_)->record_event(*event, stream), "cuEventRecord");
  if (!status.ok()) Release(std::exchange(*event, nullptr), timing);
  return status;
}

Status Gpu::TakeEvent(Event* event, Timing timing) {
  {
    std::lock_guard lock(mutex_);
    std::vector<Event>& free = FreeEvents(timing);
    if (!free.empty()) {
      *event = free.back();
      free.pop_back();
      return Status::Ok();
    }
  }
  const unsigned int flags =
      timing == Timing::kOn ? kEventDefault : kEventDisableTiming;
  return driver_->Check((*driver_)->create_event(event, flags), "cuEventCreate");
}

template <typename Function, typename... Arguments>
Status Gpu::Call(const char* name, Function Functions::* function,
                 Arguments... arguments) {
  const Current current(*this);
  KHVD_RETURN_IF_ERROR(current.status());
  return driver_->Check((driver_->functions().*function)(arguments...), name);
}

Status Gpu::MakeWait(Stream stream, Event event) {
  return Call("cuStreamWaitEvent", &Functions::stream_wait_event, stream, event, 0u);
}

Status Gpu::Query(Event event, bool* passed) {
  const Current current(*this);
  if (!current.status().ok()) return current.status();
  const Result result = (*driver_)->query_event(event);
  *passed = result == Result::kSuccess;
  if (result == Result::kNotReady) return Status::Ok();
  return driver_->Check(result, "cuEventQuery");
}

void Gpu::Release(Event event, Timing timing) {
  std::lock_guard lock(mutex_);
  FreeEvents(timing).push_back(event);
}

Status Gpu::Elapsed(Event from, Event to, std::chrono::nanoseconds* elapsed) {
  float milliseconds = 0;
  const Status status =
      Call("cuEventElapsedTime", &Functions::elapsed_time, &milliseconds, from, to);
  // As a double: a float has too few digits for nanoseconds.
  *elapsed = std::chrono::nanoseconds(static_cast<int64_t>(double{milliseconds} * 1e6));
  return status;
}

Status Gpu::CopyToHost(void* to, const void* from, size_t bytes) {
  return Call("cuMemcpyDtoHAsync", &Functions::copy_to_host, to, Address(from), bytes,
              stream_);
}

Status Gpu::CopyToDevice(void* to, const void* from, size_t bytes) {
  return Call("cuMemcpyHtoDAsync", &Functions::copy_to_device, Address(to), from, bytes,
              stream_);
}

Status Gpu::CopyOnDevice(void* to, const void* from, size_t bytes) {
  return Call("cuMemcpyDtoDAsync", &Functions::copy_on_device, Address(to),
              Address(from), bytes, stream_);
}

Status Gpu::SetZero(void* memory, size_t bytes) {
  return Call("cuMemsetD8Async", &Functions::set_bytes, Address(memory), 0, bytes,
              stream_);
}

Status Memory::Allocate(std::shared_ptr<Gpu> gpu, Space space, size_t bytes,
                        Memory* memory) {
  Memory allocated;
  allocated.space_ = space;
  allocated.bytes_ = bytes;
  allocated.gpu_ = std::move(gpu);
  Status status = bytes > 0 ? allocated.Start() : Status::Ok();
  if (status.ok()) *memory = std::move(allocated);
  return status;
}

Status Memory::Start() {
  const Driver& driver = gpu_->driver();
  const Gpu::Current current(*gpu_);
  KHVD_RETURN_IF_ERROR(current.status());
  Status status;
  if (space_ == Space::kHost) {
    status = driver.Check(driver->allocate_host(&data_, bytes_, 0), "cuMemHostAlloc");
  } else {
    Pointer address = 0;
    status = driver.Check(driver->allocate(&address, bytes_), "cuMemAlloc");
    data_ = reinterpret_cast<void*>(address);
  }
  if (status.ok()) return status;
  data_ = nullptr;
  status.message += " (" + std::to_string(bytes_) + " bytes, GPU " +
                    std::to_string(gpu_->ordinal()) + ")";
  return status;
}

Memory::~Memory() {
  if (data_ == nullptr) return;
  const Driver& driver = gpu_->driver();
  const Gpu::Current current(*gpu_);
  if (!current.status().ok()) return;
  if (space_ == Space::kHost) {
    driver->free_host(data_);
  } else {
    driver->free(Address(data_));
  }
}

Memory::Memory(Memory&& other) noexcept { *this = std::move(other); }

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(gpu_, other.gpu_);
  std::swap(space_, other.space_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace keras_hvd::cuda
