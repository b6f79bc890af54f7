// Measures the phases of one batch of GPU tensors for the timeline. It uses timed
// events on the collectives' stream, which are read once the batch is known to have
// run. Batches that the timeline does not record have none of this.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tf_ops/gpu/gpu_clock.h"
#include "tf_ops/operation/operation.h"
#include "tf_ops/timeline/timeline.h"

namespace keras_hvd {

class GpuTimes {
 public:
  // For the batch that the timeline has begun. If `reference` is null, nothing is timed
  // and the timeline says so.
  GpuTimes(Timeline* timeline, const Batch& batch, std::shared_ptr<cuda::Gpu> gpu,
           std::shared_ptr<const GpuReference> reference);
  ~GpuTimes();
  GpuTimes(const GpuTimes&) = delete;
  GpuTimes& operator=(const GpuTimes&) = delete;

  // A phase is the work put on the collectives' stream between Begin and End; a host
  // phase is the host's work.
  void Begin(GpuPhase phase);
  void End();

  // Hands the phases to the timeline. All of the batch must have run.
  void Write();

 private:
  struct Span {
    GpuPhase phase = GpuPhase::kNccl;
    std::shared_ptr<const SharedEvent> from, to;
    int64_t begin = 0, end = 0;
  };

  static bool IsOnHost(const Span& span) {
    return span.phase == GpuPhase::kHostCollective;
  }
  std::shared_ptr<const SharedEvent> Record();
  bool Locate(const SharedEvent& event, int64_t* time) const;
  bool Locate(Span* span) const;

  Timeline& timeline_;
  TimelineRecord record_;  // the fields that the whole batch shares
  const std::shared_ptr<cuda::Gpu> gpu_;
  const std::shared_ptr<const GpuReference> reference_;
  std::vector<Span> spans_;
  bool failed_ = false;  // something cannot be timed
};

// A phase that lasts as long as this object; none if `times` is null.
class GpuSpan {
 public:
  GpuSpan(GpuTimes* times, GpuPhase phase) : times_(times) {
    if (times_ != nullptr) times_->Begin(phase);
  }
  ~GpuSpan() {
    if (times_ != nullptr) times_->End();
  }
  GpuSpan(const GpuSpan&) = delete;
  GpuSpan& operator=(const GpuSpan&) = delete;

 private:
  GpuTimes* const times_;
};

}  // namespace keras_hvd
