#include "tf_ops/gpu/gpu_clock.h"

#include <sched.h>

#include <algorithm>
#include <utility>

namespace keras_hvd {
namespace {

using std::chrono::milliseconds;

// How long a reference is used for new recordings.
constexpr std::chrono::seconds kPeriod(1);
// The first one is made along with slower things, such as a communicator.
constexpr milliseconds kPatienceForFirst(100);
constexpr milliseconds kPatience(1);
// A reference this good needs no further tries.
constexpr int64_t kGoodNanoseconds = 5'000;
constexpr int kMostTries = 8;

// Makes one, unless it takes longer than `deadline`.
std::shared_ptr<const GpuReference> Try(const std::shared_ptr<cuda::Gpu>& gpu,
                                        cuda::Stream stream,
                                        Clock::time_point deadline) {
  auto reference = std::make_shared<GpuReference>();
  const int64_t before = NowNanoseconds();
  bool passed = false;
  Status status = RecordOn(gpu, stream, &reference->event, cuda::Timing::kOn);
  if (status.ok()) status = reference->event->Query(&passed);
  while (status.ok() && !passed && Clock::now() < deadline) {
    sched_yield();
    status = reference->event->Query(&passed);
  }
  const int64_t after = NowNanoseconds();
  if (!status.ok() || !passed) return nullptr;
  reference->within = (after - before + 1) / 2;
  reference->time = before + reference->within;
  return reference;
}

}  // namespace

std::shared_ptr<const GpuReference> GpuClock::Reference(
    const std::shared_ptr<cuda::Gpu>& gpu) {
  // If the GPU once fails to answer, not every batch waits for it.
  const bool is_first = next_ == Clock::time_point();
  if (reference_ == nullptr && Clock::now() >= next_) {
    Make(gpu, is_first ? kPatienceForFirst : kPatience);
  }
  return reference_;
}

void GpuClock::Renew(const std::shared_ptr<cuda::Gpu>& gpu) {
  if (reference_ != nullptr && Clock::now() >= next_) Make(gpu, kPatience);
}

// Keeps the most precise of several tries. The host disturbs them: this thread may be
// kept from looking.
void GpuClock::Make(const std::shared_ptr<cuda::Gpu>& gpu,
                    std::chrono::nanoseconds patience) {
  const Clock::time_point begin = Clock::now();
  next_ = begin + kPeriod;
  cuda::Stream stream = nullptr;
  if (!gpu->OpenIdleStream(&stream).ok()) return;
  std::shared_ptr<const GpuReference> best;
  for (int i = 0; i < kMostTries; ++i) {
    std::shared_ptr<const GpuReference> made = Try(gpu, stream, begin + patience);
    if (made == nullptr) break;
    if (best == nullptr || made->within < best->within) best = std::move(made);
    const bool late =
        Clock::now() - begin >= std::min<Clock::duration>(patience, kPatience);
    if (best->within <= kGoodNanoseconds || late) break;
  }
  if (best != nullptr) reference_ = std::move(best);
}

}  // namespace keras_hvd
