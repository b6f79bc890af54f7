// Maps moments on a GPU to the host's clock.
//
// CUDA gives the time between two events, but not when either occurred. So an event is
// recorded on an idle stream, where it occurs at once. The host's time before the
// recording and the time when the event is known to have occurred enclose it. Moments
// of collectives are measured from this reference. It is renewed from time to time,
// because the two clocks run at slightly different rates and CUDA gives times as
// floats.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "tf_ops/operation/stream_point.h"
#include "tf_ops/timeline/timeline_record.h"
#include "tf_ops/transport/doorbell.h"

namespace keras_hvd {

// An event with a known time: `time` on the timeline's clock, give or take `within`.
struct GpuReference {
  std::shared_ptr<const SharedEvent> event;
  int64_t time = 0;
  int64_t within = 0;
};

// Only one thread may use it at a time.
class GpuClock {
 public:
  // The reference for recordings from now on; null if the GPU has not answered. The
  // first call makes one and gives the GPU a tenth of a second.
  std::shared_ptr<const GpuReference> Reference(const std::shared_ptr<cuda::Gpu>& gpu);
  // Makes a new one if it is due. Takes a millisecond at most.
  void Renew(const std::shared_ptr<cuda::Gpu>& gpu);
  // Resets it to its initial state.
  void Clear() { *this = GpuClock(); }

 private:
  void Make(const std::shared_ptr<cuda::Gpu>& gpu, std::chrono::nanoseconds patience);

  std::shared_ptr<const GpuReference> reference_;
  Clock::time_point next_;  // when the next one is due; default value: none was made
};

}  // namespace keras_hvd
