// Chooses the stores for an allreduce of a given size by trying them.
//
// The fastest ones depend on the machine, on where the ranks run, on the size, on
// whether the result replaces the input, and on whether it comes from other hosts. A
// program cannot query this. It may even change by a factor of five at run time, when a
// virtual machine's processors are moved. So every kind is tried at first and the
// fastest is used. The others are tried again from time to time, slower ones more
// rarely.
//
// The first member of a process set on a host chooses for all members there. They read
// its choice when they begin, without waiting for it: any stores make the same result.
#pragma once

#include <array>
#include <cstdint>
#include <limits>

#include "tf_ops/collectives/copy.h"
#include "tf_ops/transport/segment.h"

namespace keras_hvd {

// The properties of an allreduce that decide which stores are best.
struct StoreUse {
  int64_t bytes;
  bool in_place;  // the result takes the place of the input
  bool between_hosts = false;
};

class StoreChoice {
 public:
  // `own`: the table in which other ranks read this one's choices.
  explicit StoreChoice(StoreTable* own) : own_(own), followed_(own) {}

  // From now on the rank that writes this table chooses; see above.
  void Follow(const StoreTable& table) { followed_ = &table; }

  // The stores for the next such allreduce.
  Stores Choose(const StoreUse& use) const;
  // Reports how long one took with the chosen stores.
  void Learn(const StoreUse& use, Stores stores, double seconds);

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  // Sizes that differ by less than a factor of two share their measurements. So do all
  // sizes from 64 MiB up, which fit no cache.
  static constexpr int kSizes = 27;
  static constexpr int kClasses = 4 * kSizes;
  static_assert(kClasses <= std::tuple_size_v<StoreTable>);

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
    int64_t count = 0;
    std::array<int64_t, kStoresKinds> next_trial{};  // by the class's count
  };

  static void LearnBest(Class* known, double time);
  static void LearnTrial(Class* known, double time);
  static void StartTrial(Class* known);
  static int ClassOf(const StoreUse& use);

  StoreTable* const own_;
  const StoreTable* followed_;
  std::array<Class, kClasses> classes_;
};

}  // namespace keras_hvd
