#include "tf_ops/gpu/gpu_times.h"

#include <utility>

namespace keras_hvd {

GpuTimes::GpuTimes(Timeline* timeline, const Batch& batch,
                   std::shared_ptr<cuda::Gpu> gpu,
                   std::shared_ptr<const GpuReference> reference)
    : timeline_(*timeline),
      record_(timeline_.BeginOnGpu()),
      gpu_(std::move(gpu)),
      reference_(std::move(reference)),
      failed_(reference_ == nullptr) {
  record_.description = batch.front()->description;
  record_.ranks[0] = static_cast<int>(batch.size());
  record_.times[2] = NowNanoseconds();
  if (!failed_) record_.times[3] = reference_->within;
}

GpuTimes::~GpuTimes() { timeline_.EndOnGpu(); }

void GpuTimes::Begin(GpuPhase phase) {
  if (failed_) return;
  Span& span = spans_.emplace_back();
  span.phase = phase;
  if (IsOnHost(span)) {
    span.begin = NowNanoseconds();
  } else {
    span.from = Record();
  }
}

void GpuTimes::End() {
  if (failed_) return;
  Span& span = spans_.back();
  if (IsOnHost(span)) {
    span.end = NowNanoseconds();
  } else {
    span.to = Record();
  }
}

// An error in recording an event also stops the collective, which reports it.
std::shared_ptr<const SharedEvent> GpuTimes::Record() {
  std::shared_ptr<const SharedEvent> event;
  failed_ = !RecordOn(gpu_, gpu_->stream(), &event, cuda::Timing::kOn).ok();
  return event;
}

void GpuTimes::Write() {
  bool located = !failed_;
  for (Span& span : spans_) located = located && Locate(&span);
  if (!located) return timeline_.SkipOnGpu(record_);
  for (const Span& span : spans_) {
    record_.number = static_cast<int32_t>(span.phase);
    record_.times[0] = span.begin;
    record_.times[1] = span.end;
    timeline_.AddOnGpu(record_);
  }
}

bool GpuTimes::Locate(Span* span) const {
  if (IsOnHost(*span)) return true;
  return Locate(*span->from, &span->begin) && Locate(*span->to, &span->end);
}

bool GpuTimes::Locate(const SharedEvent& event, int64_t* time) const {
  std::chrono::nanoseconds since;
  if (!event.Since(*reference_->event, &since).ok()) return false;
  *time = reference_->time + since.count();
  return true;
}

}  // namespace keras_hvd
