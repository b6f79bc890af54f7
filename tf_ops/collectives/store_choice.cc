#include "tf_ops/collectives/store_choice.h"

#include <algorithm>

namespace keras_hvd {

// Smaller tensors stay in the caches, where ordinary stores are best.
constexpr int64_t kLeastBytes = 32 << 10;
// A trial takes this many calls in a row. In the first, another member may still have
// begun with other stores.
constexpr int kTrialCalls = 2;
// A kind that was as fast as the best one is tried again after this many calls. One
// that took twice as long is tried again after four times as many, which costs less
// than 2 % of the time.
constexpr double kRetryAfter = 40;
// If the best kind's time grows by this factor, the machine has changed, and the other
// kinds are tried at once.
constexpr double kChanged = 1.4;
// A smaller gain is not worth a change.
constexpr double kBetter = 0.98;

int StoreChoice::ClassOf(const StoreUse& use) {
  const int bits = 63 - __builtin_clzll(static_cast<unsigned long long>(use.bytes));
  return (use.in_place ? kSizes : 0) + (use.between_hosts ? 2 * kSizes : 0) +
         std::min(bits, kSizes - 1);
}

Stores StoreChoice::Choose(const StoreUse& use) const {
  if (use.bytes < kLeastBytes) return Stores::kOrdinary;
  const auto& chosen = (*followed_)[ClassOf(use)];
  return static_cast<Stores>(chosen.load(std::memory_order_relaxed));
}

void StoreChoice::Learn(const StoreUse& use, Stores stores, double seconds) {
  if (use.bytes < kLeastBytes || followed_ != own_) return;
  const int number = ClassOf(use);
  Class& known = classes_[number];
  const int kind = static_cast<int>(stores);
  const double time = seconds / static_cast<double>(use.bytes);
  known.count += 1;
  if (kind == known.best) {
    LearnBest(&known, time);
  } else if (kind == known.trial) {
    LearnTrial(&known, time);
  }
  StartTrial(&known);
  (*own_)[number].store(known.trial, std::memory_order_relaxed);
}

void StoreChoice::LearnBest(Class* known, double time) {
  known->best_time = std::min(known->last_best_time, time);
  known->last_best_time = time;
  known->best_calls += 1;
  if (known->best_time > kChanged * known->compared_time) known->next_trial.fill(0);
}

void StoreChoice::LearnTrial(Class* known, double time) {
  known->trial_time = std::min(known->trial_time, time);
  known->trial_calls += 1;
  if (known->trial_calls < kTrialCalls) return;
  const double ratio = known->trial_time / std::max(known->best_time, 1e-15);
  const int loser = ratio < kBetter ? known->best : known->trial;
  // It shows soon whether the former best kind is best again.
  const double again = ratio < kBetter ? 1 : ratio * ratio;
  if (ratio < kBetter) {
    known->best = known->trial;
    known->best_time = known->last_best_time = known->trial_time;
  }
  known->next_trial[loser] =
      known->count + static_cast<int64_t>(kRetryAfter * std::min(again, 1e6));
  known->compared_time = known->best_time;
  known->trial = known->best;
}

void StoreChoice::StartTrial(Class* known) {
  if (known->trial != known->best || known->best_calls < kTrialCalls) return;
  for (int kind = 0; kind < kStoresKinds; ++kind) {
    if (kind == known->best || known->count < known->next_trial[kind]) continue;
    known->trial = kind;
    known->trial_time = kNever;
    known->trial_calls = 0;
    return;
  }
}

}  // namespace keras_hvd
