// See store_choice.h.
#include "tf_ops/collectives/store_choice.h"

#include <algorithm>

namespace keras_hvd {
namespace {

// What is smaller stays in the caches, where ordinary stores belong.
constexpr int64_t kLeastBytes = 32 << 10;
// So often each kind is tried at first: once may have met page faults.
constexpr int64_t kFirstTrials = 2;
// A kind that was as fast as the best one is tried again after so many others; one that
// took twice as long after four times as many, which costs less than 2 % of the time.
constexpr double kRetryAfter = 20;
// How much of a worse time than known is believed: peers that come late make one, too.
constexpr double kBelief = 0.3;

}  // namespace

int StoreChoice::ClassOf(int64_t bytes) {
  const int bits = 63 - __builtin_clzll(static_cast<unsigned long long>(bytes));
  return std::min(bits, kLargestClass);
}

Stores StoreChoice::Choose(int64_t bytes) const {
  if (bytes < kLeastBytes) return Stores::kOrdinary;
  const Class& known = classes_[ClassOf(bytes)];
  int best = 0;
  for (int kind = 0; kind < kStoresKinds; ++kind) {
    if (known.kinds[kind].trials < kFirstTrials) return static_cast<Stores>(kind);
    if (known.kinds[kind].seconds_per_byte < known.kinds[best].seconds_per_byte) {
      best = kind;
    }
  }
  for (int kind = 0; kind < kStoresKinds; ++kind) {
    const double ratio = known.kinds[kind].seconds_per_byte /
                         std::max(known.kinds[best].seconds_per_byte, 1e-15);
    const auto since = static_cast<double>(known.count - known.kinds[kind].last_trial);
    if (since > kRetryAfter * ratio * ratio) return static_cast<Stores>(kind);
  }
  return static_cast<Stores>(best);
}

void StoreChoice::Learn(int64_t bytes, Stores stores, double seconds) {
  if (bytes < kLeastBytes) return;
  Class& known = classes_[ClassOf(bytes)];
  Experience& kind = known.kinds[static_cast<int>(stores)];
  const double time = seconds / static_cast<double>(bytes);
  const double worse = time - kind.seconds_per_byte;
  if (kind.trials == 0 || worse < 0) {
    kind.seconds_per_byte = time;
  } else if (kind.trials >= kFirstTrials) {
    kind.seconds_per_byte += kBelief * worse;
  }
  kind.trials += 1;
  known.count += 1;
  kind.last_trial = known.count;
}

}  // namespace keras_hvd
