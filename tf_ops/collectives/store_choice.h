// Chooses the stores that an allreduce of some size writes with, by trying them.
//
// Which are fastest depends on the machine, on where the ranks run, on the size, and on
// whether the result replaces the input; nothing that a program can ask tells it, and
// where a virtual machine's processors are moved it changes by a factor of five while
// the program runs. So every kind is tried at first, the fastest is used, and the
// others are tried again from time to time: the slower one was, the more rarely.
#ifndef KERAS_HVD_TF_OPS_COLLECTIVES_STORE_CHOICE_H_
#define KERAS_HVD_TF_OPS_COLLECTIVES_STORE_CHOICE_H_

#include <array>
#include <cstdint>
#include <limits>

#include "tf_ops/collectives/copy.h"

namespace keras_hvd {

class StoreChoice {
 public:
  // The stores for the next allreduce of so many bytes.
  Stores Choose(int64_t bytes, bool in_place);
  // How long it took with what was chosen.
  void Learn(int64_t bytes, bool in_place, Stores stores, double seconds);

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  // Sizes that differ by less than a factor of two share their experience, and so do
  // all from 64 MiB up, which no cache holds.
  static constexpr int kLargestClass = 26;

  // Times are per byte, and each the better one of two calls in a row: the first one
  // may have met page faults, a late peer, or caches as other stores left them.
  struct Class {
    int best = 0;
    double best_time = kNever;
    double last_best_time = kNever;
    double compared_time = kNever;  // the best one's at the last trial
    int64_t best_calls = 0;
    int trial = 0;  // the kind that is tried, or `best`
    double trial_time = kNever;
    int trial_calls = 0;
    int64_t choices_in_trial = 0;
    int64_t count = 0;
    std::array<int64_t, kStoresKinds> next_trial{};  // by the count of the class
  };

  static void LearnBest(Class* known, double time);
  static void LearnTrial(Class* known, double time);
  static void StartTrial(Class* known);
  Class& ClassOf(int64_t bytes, bool in_place);

  std::array<std::array<Class, kLargestClass + 1>, 2> classes_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COLLECTIVES_STORE_CHOICE_H_
