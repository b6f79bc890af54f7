// See store_choice.h.
#include "tf_ops/collectives/store_choice.h"

#include <algorithm>

namespace keras_hvd {
namespace {

// What is smaller stays in the caches, where ordinary stores belong.
constexpr int64_t kLeastBytes = 128 << 10;

}  // namespace

int StoreChoice::ClassOf(int64_t bytes) {
  return 63 - __builtin_clzll(static_cast<unsigned long long>(bytes));
}

Stores StoreChoice::Choose(int64_t bytes) const {
  if (bytes < kLeastBytes) return Stores::kOrdinary;
  const Class& known = classes_[ClassOf(bytes)];
  if (known.trials < kTrials * kStoresKinds) {
    return static_cast<Stores>(known.trials % kStoresKinds);
  }
  const auto& times = known.best_seconds_per_byte;
  return static_cast<Stores>(std::min_element(times.begin(), times.end()) -
                             times.begin());
}

void StoreChoice::Learn(int64_t bytes, Stores stores, double seconds) {
  if (bytes < kLeastBytes) return;
  Class& known = classes_[ClassOf(bytes)];
  if (known.trials >= kTrials * kStoresKinds) return;
  double& best = known.best_seconds_per_byte[static_cast<int>(stores)];
  const double time = seconds / static_cast<double>(bytes);
  best = known.trials < kStoresKinds ? time : std::min(best, time);
  known.trials += 1;
}

}  // namespace keras_hvd
