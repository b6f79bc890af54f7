// Chooses the stores for an allreduce of a given size by trying them.
//
// Which are fastest depends on the machine, on where the ranks run, on the size, and on
// whether the result replaces the input. A program cannot query this. It may even
// change by a factor of five at run time, when a virtual machine's processors are
// moved. So every kind is tried at first and the fastest is used. The others are tried
// again from time to time; the slower one was, the more rarely.
#ifndef KERAS_HVD_TF_OPS_COLLECTIVES_STORE_CHOICE_H_
#define KERAS_HVD_TF_OPS_COLLECTIVES_STORE_CHOICE_H_

#include <array>
#include <cstdint>
#include <limits>
#include <random>

#include "tf_ops/collectives/copy.h"

namespace keras_hvd {

class StoreChoice {
 public:
  StoreChoice();

  // The stores for the next allreduce of this many bytes.
  Stores Choose(int64_t bytes, bool in_place);
  // Reports how long an allreduce took with the chosen stores.
  void Learn(int64_t bytes, bool in_place, Stores stores, double seconds);

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  // Sizes that differ by less than a factor of two share their measurements. So do all
  // sizes from 64 MiB up, which fit no cache.
  static constexpr int kLargestClass = 26;

  // Times are per byte, each the better of two calls in a row: the first call may have
  // met page faults, a late peer, or caches left by other stores.
  struct Class {
    int best = 0;
    double best_time = kNever;
    double last_best_time = kNever;
    double compared_time = kNever;  // the best one's at the last trial
    int64_t best_calls = 0;
    int trial = 0;  // the kind being tried, or `best`
    double trial_time = kNever;
    int trial_calls = 0;
    int64_t choices_in_trial = 0;
    int64_t count = 0;
    std::array<int64_t, kStoresKinds> next_trial{};  // by the class's count
  };

  static void LearnBest(Class* known, double time);
  static void LearnTrial(Class* known, double time);
  static void StartTrial(Class* known);
  Class& ClassOf(int64_t bytes, bool in_place);

  std::array<std::array<Class, kLargestClass + 1>, 2> classes_;
  std::minstd_rand random_;
  std::bernoulli_distribution later_;  // whether a later choice belongs to the trial
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COLLECTIVES_STORE_CHOICE_H_
