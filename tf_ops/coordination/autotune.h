// Searches for the settings of the engine with which a job moves most bytes a second.
//
// A state machine without clock or I/O, on the coordinator: what has run and when goes
// in, settings come out. It looks at one setting after the other, and at one value of
// it beside the best so far, in turns, so that whatever else changes meets both. In the
// end the best stand against the defaults in the same way, for longer, and are kept
// only where they clearly win: noise alone leaves the defaults.
#ifndef KERAS_HVD_TF_OPS_COORDINATION_AUTOTUNE_H_
#define KERAS_HVD_TF_OPS_COORDINATION_AUTOTUNE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "tf_ops/collectives/allreduce.h"
#include "tf_ops/coordination/coordinator.h"

namespace keras_hvd {

// What can be changed while a job runs, between two collectives.
struct Tuning {
  int64_t fusion_bytes = 64 << 20;               // the most that is one batch
  int64_t window_bytes = kAllreduceWindowBytes;  // see allreduce.h
  int64_t small_bytes = kAllreduceSmallBytes;    // see allreduce.h
  int64_t spin_microseconds = 50;                // for a peer that is known to be ready

  bool operator==(const Tuning& other) const {
    return fusion_bytes == other.fusion_bytes && window_bytes == other.window_bytes &&
           small_bytes == other.small_bytes &&
           spin_microseconds == other.spin_microseconds;
  }
  bool operator!=(const Tuning& other) const { return !(*this == other); }
};

// Whether the engine can run with it: windows of whole cache lines, no larger than any
// exchange memory, and no spinning that nobody would want.
bool IsPossible(const Tuning& tuning);
// "fusion_bytes=67108864 window_bytes=1048576 ...".
std::string Describe(const Tuning& tuning);

struct AutotuneOptions {
  bool on = false;
  std::string log;  // the file, or ""; see autotune_log.h
  // Samples before the first that counts.
  int warmup_samples = 3;
  // A step has passed when the tensor that began the sample comes again.
  int steps_per_sample = 10;
  // Shorter samples tell of single events.
  double least_seconds = 0.02;
  // After which no other value is tried; the comparison in the end comes on top. 0: no
  // limit but the number of values.
  int most_samples = 0;
  // What is left as it is: fusion where somebody has chosen, spinning where ranks share
  // cores and yield instead, windows that find no room.
  bool tunes_fusion = true;
  bool tunes_spin = true;
  int64_t most_window_bytes = 2 << 20;
  // What an earlier job has found: the best of its search, or its result, for which it
  // is only compared with the defaults once more.
  enum class Known { kNothing, kBest, kResult };
  Known known = Known::kNothing;
  Tuning start;
};

class Autotune {
 public:
  enum class Stage { kWarmup, kSearch, kFinal, kDone };
  // Something measured.
  struct Sample {
    Stage stage;
    Tuning tuning;
    double bytes_per_second;
  };

  Autotune(AutotuneOptions options, const Tuning& defaults);

  // The settings that are to hold now.
  const Tuning& tuning() const { return tuning_; }
  // They do hold, from the next batch on.
  void Begin();
  // A batch with these tensors has run until `now`, in seconds. Returns true if a
  // sample has ended with it. If tuning() is another one then, nothing counts until
  // Begin.
  bool Add(const std::vector<TensorKey>& tensors, int64_t bytes, double now);

  bool done() const { return stage_ == Stage::kDone; }
  // Whether best() is a result, of this job or, until it has one, of an earlier.
  bool has_result() const {
    return done() || options_.known == AutotuneOptions::Known::kResult;
  }
  // The best so far, or the result.
  const Tuning& best() const { return best_; }
  const std::vector<Sample>& samples() const { return samples_; }

 private:
  // Two that take turns.
  struct Duel {
    Tuning holder, challenger;
    std::vector<double> scores;  // in the order of the turns
    std::vector<double> ratios;  // of each pair, the challenger's to the holder's
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
  std::vector<Tuning> challengers_;  // still to come, of one setting
  size_t next_setting_ = 0;
  std::vector<Sample> samples_;

  // The sample that is being taken.
  enum class State { kSwitching, kReady, kSampling };
  State state_ = State::kSwitching;
  TensorKey marker_;
  // Until the marker has come again: how often others have.
  std::unordered_map<TensorKey, int, TensorKeyHash> repeats_;
  int steps_ = 0;
  int batches_ = 0;
  int64_t bytes_ = 0;
  double began_ = 0;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COORDINATION_AUTOTUNE_H_
