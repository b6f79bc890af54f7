// Autotuning against machines that are simulated, so that the best settings are known.
#include "tf_ops/coordination/autotune.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

namespace keras_hvd {
namespace {

using Stage = Autotune::Stage;

constexpr int64_t kStepBytes = 1 << 20;
// More than any search takes.
constexpr int kMostSteps = 100'000;

std::vector<TensorKey> Keys(const std::vector<std::string>& names) {
  std::vector<TensorKey> keys;
  for (const std::string& name : names) keys.push_back({0, name});
  return keys;
}

AutotuneOptions Quick() {
  AutotuneOptions options;
  options.steps_per_sample = 2;
  options.least_seconds = 0;
  options.hosts = 4;
  return options;
}

// Takes steps of two batches with the settings that hold.
class Machine {
 public:
  using Seconds = std::function<double(const Tuning&)>;
  explicit Machine(Seconds seconds, double noise = 0, uint64_t seed = 0)
      : seconds_(std::move(seconds)), noise_(noise), random_(seed) {}

  // Runs until the end of the search. Returns its cost in steps.
  int Run(Autotune* autotune) {
    autotune->Begin();
    int steps = 0;
    for (; !autotune->done() && steps < kMostSteps; ++steps) {
      const double seconds = TakeStep(autotune->tuning());
      for (const char* name : {"grad/b", "grad/a"}) {
        now_ += seconds / 2;
        const Tuning before = autotune->tuning();
        autotune->Add(Keys({name}), kStepBytes / 2, now_);
        if (autotune->tuning() != before) autotune->Begin();
      }
    }
    EXPECT_TRUE(autotune->done());
    return steps;
  }

  double TrueSeconds(const Tuning& tuning) const { return seconds_(tuning); }

 private:
  double TakeStep(const Tuning& tuning) {
    // The whole machine becomes slower and faster again, and now and then it pauses.
    drift_ = 1 + 0.3 * std::sin(now_ / 5);
    const double pause = random_() % 200 == 0 ? 0.05 : 0;
    const double noise = std::exp(noise_ * normal_(random_));
    return noise_ == 0 ? seconds_(tuning) : seconds_(tuning) * drift_ * noise + pause;
  }

  const Seconds seconds_;
  const double noise_;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  double now_ = 1000;
  double drift_ = 1;
};

double Factor(const Tuning& tuning, const Tuning& best, double worse) {
  double factor = 1;
  if (tuning.window_bytes != best.window_bytes) factor *= worse;
  if (tuning.small_bytes != best.small_bytes) factor *= worse;
  if (tuning.fusion_bytes != best.fusion_bytes) factor *= worse;
  if (tuning.spin_microseconds != best.spin_microseconds) factor *= worse;
  if (tuning.halving_hosts != best.halving_hosts) factor *= worse;
  return factor;
}

Tuning Different() {
  Tuning best;
  best.window_bytes = 256 << 10;
  best.small_bytes = 64 << 10;
  best.fusion_bytes = 4 << 20;
  best.spin_microseconds = 150;
  best.halving_hosts = kLeastHalvingHosts;
  return best;
}

TEST(AutotuneTest, FindsTheBestOfEverySetting) {
  const Tuning best = Different();
  Machine machine([&](const Tuning& t) { return 0.01 * Factor(t, best, 1.1); });
  Autotune autotune(Quick(), Tuning());
  machine.Run(&autotune);
  EXPECT_EQ(autotune.tuning(), best);
  EXPECT_EQ(autotune.best(), best);
}

TEST(AutotuneTest, FindsItUnderNoise) {
  const Tuning best = Different();
  int found = 0;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Machine machine([&](const Tuning& t) { return 0.01 * Factor(t, best, 1.1); }, 0.02,
                    seed);
    Autotune autotune(Quick(), Tuning());
    machine.Run(&autotune);
    const double seconds = machine.TrueSeconds(autotune.tuning());
    found += seconds < machine.TrueSeconds(Tuning()) / 1.2 ? 1 : 0;
  }
  EXPECT_GE(found, 45);
}

TEST(AutotuneTest, KeepsTheDefaultsWhereNothingIsBetter) {
  Machine machine([](const Tuning& t) { return 0.01 * Factor(t, Tuning(), 1.05); });
  Autotune autotune(Quick(), Tuning());
  machine.Run(&autotune);
  EXPECT_EQ(autotune.tuning(), Tuning());
}

TEST(AutotuneTest, KeepsTheDefaultsWhereOthersAreHardlyBetter) {
  const Tuning best = Different();
  for (const double worse : {1.01, 1.03}) {
    Machine machine([&](const Tuning& t) { return 0.01 * Factor(t, best, worse); });
    Autotune autotune(Quick(), Tuning());
    machine.Run(&autotune);
    EXPECT_EQ(autotune.tuning(), worse > 1.02 ? best : Tuning());
  }
}

TEST(AutotuneTest, KeepsTheDefaultsWhereNothingMatters) {
  int kept = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Machine machine([](const Tuning&) { return 0.01; }, 0.05, seed);
    Autotune autotune(Quick(), Tuning());
    machine.Run(&autotune);
    kept += autotune.tuning() == Tuning() ? 1 : 0;
  }
  EXPECT_GE(kept, 95);
}

TEST(AutotuneTest, DoesNotEndSlowerThanTheDefaults) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::uniform_real_distribution<double> factor(0.98, 1.15);
    // Every value of every setting has a factor of its own; the defaults are good ones.
    const auto of = [&](int64_t value, int64_t known) {
      std::minstd_rand own(std::hash<uint64_t>()(value) * 31 + seed + 1);
      own.discard(3);
      return value == known ? 1 : factor(own);
    };
    const Tuning known;
    Machine machine(
        [&](const Tuning& t) {
          return 0.01 * of(t.window_bytes, known.window_bytes) *
                 of(t.small_bytes, known.small_bytes) *
                 of(t.fusion_bytes, known.fusion_bytes) *
                 of(t.spin_microseconds, known.spin_microseconds) *
                 of(t.halving_hosts, known.halving_hosts);
        },
        0.01 + 0.04 * (seed % 3), seed);
    Autotune autotune(Quick(), known);
    machine.Run(&autotune);
    EXPECT_LE(machine.TrueSeconds(autotune.tuning()), 1.03 * machine.TrueSeconds(known))
        << "seed " << seed << ": " << Describe(autotune.tuning());
  }
}

TEST(AutotuneTest, WorseThanTheDefaultsAreOutOnceTheyHaveLostTwice) {
  // 14 other values of all settings, two pairs of each.
  Machine machine([](const Tuning& t) { return 0.01 * Factor(t, Tuning(), 1.5); });
  Autotune autotune(Quick(), Tuning());
  machine.Run(&autotune);
  EXPECT_EQ(autotune.samples().size(), 3 + 14 * 4u);
}

TEST(AutotuneTest, TheMostSamplesEndTheSearch) {
  AutotuneOptions options = Quick();
  options.most_samples = 8;
  const Tuning best = Different();
  Machine machine([&](const Tuning& t) { return 0.01 * Factor(t, best, 1.1); });
  Autotune autotune(options, Tuning());
  machine.Run(&autotune);
  int before_the_end = 0;
  for (const Autotune::Sample& sample : autotune.samples()) {
    before_the_end += sample.stage != Stage::kFinal ? 1 : 0;
  }
  EXPECT_GE(before_the_end, 8);
  EXPECT_LE(before_the_end, 8 + 9);  // the current duel goes on
}

TEST(AutotuneTest, WhatMustStayStays) {
  AutotuneOptions options = Quick();
  options.tunes_fusion = options.tunes_spin = false;
  options.most_window_bytes = 512 << 10;
  options.hosts = 2;
  Tuning defaults;
  defaults.fusion_bytes = 12345;
  Machine machine([](const Tuning& t) { return 1e4 / double(t.window_bytes); });
  Autotune autotune(options, defaults);
  machine.Run(&autotune);
  for (const Autotune::Sample& sample : autotune.samples()) {
    EXPECT_EQ(sample.tuning.fusion_bytes, 12345);
    EXPECT_EQ(sample.tuning.spin_microseconds, defaults.spin_microseconds);
    EXPECT_EQ(sample.tuning.halving_hosts, defaults.halving_hosts);
    EXPECT_TRUE(sample.tuning.window_bytes <= options.most_window_bytes ||
                sample.tuning.window_bytes == defaults.window_bytes);
  }
}

TEST(AutotuneTest, TheOtherWayToExchangeIsTried) {
  for (const int hosts : {4, 16}) {
    AutotuneOptions options = Quick();
    options.hosts = hosts;
    // Slower by halving on more than 12 hosts, and by a direct exchange on fewer.
    const auto is_slow = [&](const Tuning& t) {
      return (hosts >= t.halving_hosts) == (hosts > 12);
    };
    Machine machine([&](const Tuning& t) { return is_slow(t) ? 0.012 : 0.01; });
    Autotune autotune(options, Tuning());
    machine.Run(&autotune);
    EXPECT_EQ(autotune.tuning().halving_hosts,
              hosts > 12 ? kNeverHalving : kLeastHalvingHosts);
  }
}

TEST(AutotuneTest, AKnownResultIsOnlyComparedWithTheDefaults) {
  AutotuneOptions options = Quick();
  options.known = AutotuneOptions::Known::kResult;
  options.start = Different();
  for (const double worse : {1.1, 0.9}) {
    Machine machine([&](const Tuning& t) { return Factor(t, options.start, worse); });
    Autotune autotune(options, Tuning());
    EXPECT_EQ(autotune.tuning(), options.start);
    machine.Run(&autotune);
    EXPECT_EQ(autotune.tuning(), worse > 1 ? options.start : Tuning());
    for (const Autotune::Sample& sample : autotune.samples()) {
      EXPECT_NE(sample.stage, Stage::kSearch);
      EXPECT_TRUE(sample.tuning == options.start || sample.tuning == Tuning());
    }
  }
}

TEST(AutotuneTest, AKnownBestIsWhereTheSearchGoesOn) {
  AutotuneOptions options = Quick();
  options.known = AutotuneOptions::Known::kBest;
  options.start.window_bytes = 256 << 10;
  options.warmup_samples = 0;
  const Tuning best = Different();
  Machine machine([&](const Tuning& t) { return Factor(t, best, 1.1); });
  Autotune autotune(options, Tuning());
  machine.Run(&autotune);
  EXPECT_EQ(autotune.samples().front().tuning, options.start);
  EXPECT_EQ(autotune.samples().front().stage, Stage::kSearch);
  EXPECT_EQ(autotune.tuning(), best);
}

// ---- Samples

TEST(AutotuneTest, ASampleIsOfWholeStepsHoweverTheyAreFused) {
  Autotune autotune(Quick(), Tuning());
  EXPECT_FALSE(autotune.Add(Keys({"a"}), 100, 0.5));  // the settings do not hold yet
  autotune.Begin();
  EXPECT_FALSE(autotune.Add(Keys({"a"}), 100, 1));
  EXPECT_FALSE(autotune.Add(Keys({"b"}), 200, 2));
  EXPECT_FALSE(autotune.Add(Keys({"b", "a"}), 300, 3));
  EXPECT_TRUE(autotune.Add(Keys({"a", "b"}), 300, 5));
  ASSERT_EQ(autotune.samples().size(), 1u);
  EXPECT_EQ(autotune.samples()[0].stage, Stage::kWarmup);
  EXPECT_EQ(autotune.samples()[0].bytes_per_second, 800 / 4.0);
}

TEST(AutotuneTest, ASampleHasALeastTime) {
  AutotuneOptions options = Quick();
  options.least_seconds = 1;
  Autotune autotune(options, Tuning());
  autotune.Begin();
  for (int i = 0; i <= 10; ++i) EXPECT_FALSE(autotune.Add(Keys({"a"}), 1, 0.1 * i));
  EXPECT_TRUE(autotune.Add(Keys({"a"}), 1, 1.1));
}

TEST(AutotuneTest, AStepIsNotCountedByWhatComesOnceInAnEpoch) {
  Autotune autotune(Quick(), Tuning());
  autotune.Begin();
  EXPECT_FALSE(autotune.Add(Keys({"stop_training"}), 1, 0));
  double now = 0;
  int steps = 0;
  for (bool ended = false; !ended; ++steps) {
    autotune.Add(Keys({"grad/b"}), 100, now += 1);
    ended = autotune.Add(Keys({"grad/a"}), 100, now += 1);
    ended |= !autotune.samples().empty();
  }
  EXPECT_LT(steps, 30);
  EXPECT_EQ(autotune.samples()[0].bytes_per_second, 100);
}

TEST(AutotuneTest, NamesThatNeverComeAgainMakeStepsAsWell) {
  Autotune autotune(Quick(), Tuning());
  autotune.Begin();
  int batches = 0;
  while (!autotune.Add(Keys({"x" + std::to_string(batches)}), 1, batches)) batches += 1;
  EXPECT_EQ(batches, 200);
}

TEST(AutotuneTest, NothingCountsUntilTheNewSettingsHold) {
  AutotuneOptions options = Quick();
  options.warmup_samples = 1;
  Autotune autotune(options, Tuning());
  autotune.Begin();
  double now = 0;
  while (autotune.tuning() == Tuning()) autotune.Add(Keys({"a"}), 100, now += 1);
  const size_t taken = autotune.samples().size();
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(autotune.Add(Keys({"a"}), 1, now += 100));
  autotune.Begin();
  while (autotune.samples().size() == taken) autotune.Add(Keys({"a"}), 100, now += 1);
  EXPECT_EQ(autotune.samples().back().bytes_per_second, 100);
}

}  // namespace
}  // namespace keras_hvd
