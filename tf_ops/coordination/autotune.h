// Searches for the engine settings with which a job moves the most bytes per second.
//
// A state machine without clock or I/O, on the coordinator: batches and their times go
// in, settings come out. It tries one setting after the other, one value at a time. The
// value and the best so far take turns, so other changes affect both alike. In the end
// the best settings compete with the defaults in the same way, for longer. They are
// kept only if they clearly win: noise alone leaves the defaults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "tf_ops/collectives/allreduce.h"
#include "tf_ops/coordination/coordinator.h"

namespace keras_hvd {

// The settings that can change while a job runs, between two collectives.
struct Tuning {
  int64_t fusion_bytes = 64 << 20;               // limit of a batch
  int64_t window_bytes = kAllreduceWindowBytes;  // see allreduce.h
  int64_t small_bytes = kAllreduceSmallBytes;    // see allreduce.h
  int64_t spin_microseconds = 50;                // for a peer known to be ready
  int64_t halving_hosts = kHalvingHosts;         // see allreduce.h

  bool operator==(const Tuning& other) const {
    return fusion_bytes == other.fusion_bytes && window_bytes == other.window_bytes &&
           small_bytes == other.small_bytes &&
           spin_microseconds == other.spin_microseconds &&
           halving_hosts == other.halving_hosts;
  }
  bool operator!=(const Tuning& other) const { return !(*this == other); }
};

// Whether the engine can run with these settings: windows of whole cache lines, no
// larger than any exchange memory, and no unreasonably long spinning.
bool IsPossible(const Tuning& tuning);
// "fusion_bytes=67108864 window_bytes=1048576 ...".
std::string Describe(const Tuning& tuning);

struct AutotuneOptions {
  bool on = false;
  std::string log;  // the file or ""; see autotune_log.h
  // Discarded samples before the first that counts.
  int warmup_samples = 3;
  // A step ends when the tensor that began the sample comes again.
  int steps_per_sample = 10;
  // Shorter samples reflect single events.
  double least_seconds = 0.02;
  // Limit after which no other value is tried; the final comparison comes on top. 0:
  // limited only by the number of values.
  int most_samples = 0;
  // Whether to tune these. Not tuned: fusion that a user has chosen, spinning if ranks
  // share cores and yield instead, windows that do not fit, and the exchange of one or
  // two hosts.
  bool tunes_fusion = true;
  bool tunes_spin = true;
  int64_t most_window_bytes = 2 << 20;
  int hosts = 1;  // of the job
  // The finding of an earlier job: the best of its search, or its result, which is then
  // only compared with the defaults once more.
  enum class Known { kNothing, kBest, kResult };
  Known known = Known::kNothing;
  Tuning start;
};

class Autotune {
 public:
  enum class Stage { kWarmup, kSearch, kFinal, kDone };
  // One measurement.
  struct Sample {
    Stage stage;
    Tuning tuning;
    double bytes_per_second;
  };

  Autotune(AutotuneOptions options, const Tuning& defaults);

  // The settings to use now.
  const Tuning& tuning() const { return tuning_; }
  // The settings take effect with the next batch.
  void Begin();
  // A batch with these tensors has ended at `now`, in seconds. Returns true if a sample
  // ends with it. If tuning() has changed then, nothing counts until Begin.
  bool Add(const std::vector<TensorKey>& tensors, int64_t bytes, double now);

  bool done() const { return stage_ == Stage::kDone; }
  // Whether best() is a result, of this job or, until it has one, of an earlier job.
  bool has_result() const {
    return done() || options_.known == AutotuneOptions::Known::kResult;
  }
  // The best settings so far, or the result.
  const Tuning& best() const { return best_; }
  const std::vector<Sample>& samples() const { return samples_; }

 private:
  // Two settings that take turns.
  struct Duel {
    Tuning holder, challenger;
    std::vector<double> scores;  // in order of turns
    std::vector<double> ratios;  // per pair, the challenger's score over the holder's
  };

  std::vector<Tuning> Values(size_t setting) const;
  void BeginSample(const TensorKey& marker, double now);
  void EndSample(double score);
  void EndWarmup();
  void StartDuel(const Tuning& holder, const Tuning& challenger);
  bool IsChallengersTurn() const;
  void EndDuel(bool won);
  void NextChallenger();
  void StartFinal();
  void Finish(const Tuning& result);

  const AutotuneOptions options_;
  const Tuning defaults_;
  Stage stage_ = Stage::kWarmup;
  Tuning tuning_;
  Tuning best_;
  Duel duel_;
  std::vector<Tuning> challengers_;  // still to come, for one setting
  size_t next_setting_ = 0;
  std::vector<Sample> samples_;

  // The current sample.
  enum class State { kSwitching, kReady, kSampling };
  State state_ = State::kSwitching;
  TensorKey marker_;
  // How often other tensors have come before the marker came again.
  std::unordered_map<TensorKey, int, TensorKeyHash> repeats_;
  int steps_ = 0;
  int batches_ = 0;
  int64_t bytes_ = 0;
  double began_ = 0;
};

}  // namespace keras_hvd
