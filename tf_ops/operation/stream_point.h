// The position of a GPU request in its caller's stream: after the caller's earlier
// work, and before its later work.
#pragma once

#include <sched.h>

#include <chrono>
#include <memory>
#include <utility>

#include "tf_ops/cuda/gpu.h"

namespace keras_hvd {

// An event that is returned with the last reference to it.
class SharedEvent {
 public:
  SharedEvent(std::shared_ptr<cuda::Gpu> gpu, cuda::Event event,
              cuda::Timing timing = cuda::Timing::kOff)
      : gpu_(std::move(gpu)), event_(event), timing_(timing) {}
  ~SharedEvent() { gpu_->Release(event_, timing_); }
  SharedEvent(const SharedEvent&) = delete;
  SharedEvent& operator=(const SharedEvent&) = delete;

  cuda::Gpu& gpu() const { return *gpu_; }
  Status MakeWait(cuda::Stream stream) const { return gpu_->MakeWait(stream, event_); }
  Status Query(bool* passed) const { return gpu_->Query(event_, passed); }
  // The time since an earlier event; see cuda::Gpu::Elapsed.
  Status Since(const SharedEvent& earlier, std::chrono::nanoseconds* elapsed) const {
    return gpu_->Elapsed(earlier.event_, event_, elapsed);
  }

 private:
  const std::shared_ptr<cuda::Gpu> gpu_;
  const cuda::Event event_;
  const cuda::Timing timing_;
};

// Records an event after the work that is on `stream` now.
inline Status RecordOn(const std::shared_ptr<cuda::Gpu>& gpu, cuda::Stream stream,
                       std::shared_ptr<const SharedEvent>* recorded,
                       cuda::Timing timing = cuda::Timing::kOff) {
  cuda::Event event = nullptr;
  const Status status = gpu->Record(stream, &event, timing);
  if (status.ok()) *recorded = std::make_shared<SharedEvent>(gpu, event, timing);
  return status;
}

// The mark that khvd_await_end takes back.
struct EndMark {
  // Makes later work on the stream run after the collective. If the stream cannot be
  // told to wait, this call waits itself, for as long as anything runs on the GPU:
  // until then the collective owns the buffers.
  Status Await(cuda::Stream stream) const {
    const Status status = event->MakeWait(stream);
    bool passed = status.ok();
    while (!passed && event->Query(&passed).ok()) sched_yield();
    return status;
  }

  std::shared_ptr<const SharedEvent> event;
};

struct StreamPoint {
  std::shared_ptr<cuda::Gpu> gpu;
  cuda::Stream stream = nullptr;
  std::shared_ptr<const SharedEvent> ready;  // the inputs are complete
  void** end = nullptr;  // null: the stream itself waits for the results
};

}  // namespace keras_hvd
