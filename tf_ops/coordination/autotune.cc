#include "tf_ops/coordination/autotune.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

namespace keras_hvd {
namespace {

// The length of a step in batches if the sample's first tensor does not come again.
constexpr int kMostBatchesPerStep = 100;
// If another tensor comes this often before that one returns, steps are counted by it
// instead: the first one comes only once, or at the end of an epoch.
constexpr int kMostRepeats = 20;
// Number of pairs in a duel of two settings: in the search, and in the final.
constexpr size_t kSearchPairs = 5;
constexpr size_t kFinalPairs = 9;
// A challenger may lose one pair at most, and must win half of them by this factor.
constexpr int kMostLosses = 1;
constexpr double kMargin = 1.02;
constexpr size_t kSettings = 5;
// Longer spinning is a mistake, and so are windows too large for any exchange memory.
constexpr int64_t kMostSpinMicroseconds = 1000;
constexpr int64_t kMostWindowBytes = 1 << 30;

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

bool IsPossible(const Tuning& tuning) {
  return tuning.fusion_bytes > 0 && tuning.window_bytes > 0 &&
         tuning.window_bytes % kCacheLine == 0 &&
         tuning.window_bytes <= kMostWindowBytes && tuning.small_bytes >= 0 &&
         tuning.small_bytes <= kMostWindowBytes && tuning.spin_microseconds >= 0 &&
         tuning.spin_microseconds <= kMostSpinMicroseconds &&
         tuning.halving_hosts >= kLeastHalvingHosts &&
         tuning.halving_hosts <= kNeverHalving;
}

std::string Describe(const Tuning& tuning) {
  return "fusion_bytes=" + std::to_string(tuning.fusion_bytes) +
         " window_bytes=" + std::to_string(tuning.window_bytes) +
         " small_bytes=" + std::to_string(tuning.small_bytes) +
         " spin_microseconds=" + std::to_string(tuning.spin_microseconds) +
         " halving_hosts=" + std::to_string(tuning.halving_hosts);
}

Autotune::Autotune(AutotuneOptions options, const Tuning& defaults)
    : options_(std::move(options)),
      defaults_(defaults),
      tuning_(defaults),
      best_(defaults) {
  if (options_.known != AutotuneOptions::Known::kNothing) {
    best_ = options_.start;
    if (!options_.tunes_fusion) best_.fusion_bytes = defaults.fusion_bytes;
    tuning_ = best_;
  }
  if (options_.warmup_samples == 0) EndWarmup();
}

void Autotune::Begin() { state_ = State::kReady; }

bool Autotune::Add(const std::vector<TensorKey>& tensors, int64_t bytes, double now) {
  if (done() || state_ == State::kSwitching) return false;
  if (state_ == State::kReady) {
    // The first batch may have waited for anything, so the time runs from its end.
    BeginSample(tensors.front(), now);
    return false;
  }
  bytes_ += bytes;
  batches_ += 1;
  const bool again =
      std::find(tensors.begin(), tensors.end(), marker_) != tensors.end();
  if (again || batches_ == kMostBatchesPerStep) {
    steps_ += 1;
    batches_ = 0;
  } else if (steps_ == 0) {
    for (const TensorKey& tensor : tensors) {
      if (++repeats_[tensor] < kMostRepeats) continue;
      BeginSample(tensor, now);
      return false;
    }
  }
  const double seconds = now - began_;
  if (steps_ < options_.steps_per_sample || seconds <= options_.least_seconds) {
    return false;
  }
  const Tuning before = tuning_;
  EndSample(static_cast<double>(bytes_) / seconds);
  state_ = tuning_ == before ? State::kReady : State::kSwitching;
  return true;
}

void Autotune::BeginSample(const TensorKey& marker, double now) {
  state_ = State::kSampling;
  marker_ = marker;
  repeats_.clear();
  steps_ = batches_ = 0;
  bytes_ = 0;
  began_ = now;
}

void Autotune::EndSample(double score) {
  samples_.push_back({stage_, tuning_, score});
  if (stage_ == Stage::kWarmup) {
    if (samples_.size() == static_cast<size_t>(options_.warmup_samples)) EndWarmup();
    return;
  }
  duel_.scores.push_back(score);
  if (duel_.scores.size() % 2 == 0) {
    const double last = duel_.scores[duel_.scores.size() - 2];
    // In every other pair, the challenger takes the second turn.
    const bool second_is_challenger = duel_.ratios.size() % 2 == 0;
    duel_.ratios.push_back(second_is_challenger ? score / last : last / score);
    const auto lost = [](double ratio) { return !(ratio > 1); };
    const size_t pairs = stage_ == Stage::kFinal ? kFinalPairs : kSearchPairs;
    if (std::count_if(duel_.ratios.begin(), duel_.ratios.end(), lost) > kMostLosses) {
      return EndDuel(false);
    }
    if (duel_.ratios.size() == pairs) return EndDuel(Median(duel_.ratios) > kMargin);
  }
  tuning_ = IsChallengersTurn() ? duel_.challenger : duel_.holder;
}

void Autotune::EndWarmup() {
  if (options_.known == AutotuneOptions::Known::kResult) return StartFinal();
  stage_ = Stage::kSearch;
  NextChallenger();
}

void Autotune::StartDuel(const Tuning& holder, const Tuning& challenger) {
  duel_ = {holder, challenger, {}, {}};
  tuning_ = holder;
}

// Holder, challenger, challenger, holder, holder, ...: drift affects both alike.
bool Autotune::IsChallengersTurn() const {
  const size_t turn = duel_.scores.size() % 4;
  return turn == 1 || turn == 2;
}

void Autotune::EndDuel(bool won) {
  if (stage_ == Stage::kFinal) return Finish(won ? best_ : defaults_);
  if (won) best_ = duel_.challenger;
  NextChallenger();
}

void Autotune::NextChallenger() {
  while (challengers_.empty() && next_setting_ < kSettings) {
    challengers_ = Values(next_setting_++);
  }
  const bool enough = options_.most_samples > 0 &&
                      samples_.size() >= static_cast<size_t>(options_.most_samples);
  if (challengers_.empty() || enough) return StartFinal();
  // Only this setting has changed since the challengers were planned.
  const Tuning challenger = challengers_.back();
  challengers_.pop_back();
  StartDuel(best_, challenger);
}

// The best settings, with other values of one setting.
std::vector<Tuning> Autotune::Values(size_t setting) const {
  std::vector<Tuning> values;
  const auto add = [&](int64_t Tuning::* member, std::initializer_list<int64_t> all,
                       int64_t most) {
    for (const int64_t value : all) {
      if (value == best_.*member || value > most) continue;
      values.push_back(best_);
      values.back().*member = value;
    }
  };
  switch (setting) {
    case 0:
      add(&Tuning::window_bytes, {128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20},
          options_.most_window_bytes);
      break;
    case 1:
      add(&Tuning::small_bytes, {2 << 10, 4 << 10, 16 << 10, 64 << 10}, INT64_MAX);
      break;
    case 2:
      if (!options_.tunes_fusion) break;
      add(&Tuning::fusion_bytes, {1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20},
          INT64_MAX);
      break;
    case 3:
      if (options_.tunes_spin) {
        add(&Tuning::spin_microseconds, {10, 50, 150}, INT64_MAX);
      }
      break;
    case 4:
      if (options_.hosts < kLeastHalvingHosts) break;
      add(&Tuning::halving_hosts,
          {options_.hosts < best_.halving_hosts ? kLeastHalvingHosts : kNeverHalving},
          INT64_MAX);
      break;
  }
  return values;
}

void Autotune::StartFinal() {
  if (best_ == defaults_) return Finish(defaults_);
  stage_ = Stage::kFinal;
  StartDuel(defaults_, best_);
}

void Autotune::Finish(const Tuning& result) {
  stage_ = Stage::kDone;
  tuning_ = best_ = result;
}

}  // namespace keras_hvd
