// Places moments on a GPU on the host's clock.
//
// CUDA tells the time between two events, and nothing of when either was. So an event
// is recorded on a stream that is idle, where it comes at once: the host's time before
// the recording and that at which it is known to have come enclose it. The moments of
// collectives are told from such a reference, which is made anew from time to time, for
// the two clocks do not go at quite the same pace, and CUDA gives times as floats.
#ifndef KERAS_HVD_TF_OPS_GPU_GPU_CLOCK_H_
#define KERAS_HVD_TF_OPS_GPU_GPU_CLOCK_H_

#include <chrono>
#include <cstdint>
#include <memory>

#include "tf_ops/operation/stream_point.h"
#include "tf_ops/timeline/timeline_record.h"
#include "tf_ops/transport/doorbell.h"

namespace keras_hvd {

// An event of which it is known when it came: at `time` of the timeline's, or at most
// `within` before or after that.
struct GpuReference {
  std::shared_ptr<const SharedEvent> event;
  int64_t time = 0;
  int64_t within = 0;
};

// All of it is for one thread at a time.
class GpuClock {
 public:
  // The reference for what is recorded from now on; null if the GPU has not answered.
  // The first one is made here, for which the GPU has a tenth of a second.
  std::shared_ptr<const GpuReference> Reference(const std::shared_ptr<cuda::Gpu>& gpu);
  // Makes a new one where that is due, which takes a millisecond at most.
  void Renew(const std::shared_ptr<cuda::Gpu>& gpu);
  // As if it had never been asked.
  void Clear() { *this = GpuClock(); }

 private:
  void Make(const std::shared_ptr<cuda::Gpu>& gpu, std::chrono::nanoseconds patience);

  std::shared_ptr<const GpuReference> reference_;
  Clock::time_point next_;  // when one is due; the beginning of time: none was made
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_GPU_GPU_CLOCK_H_
