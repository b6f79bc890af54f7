// Chooses the stores that an allreduce of some size writes with, by trying them.
//
// Which are fastest depends on the machine, on where the ranks run, and on the size;
// nothing that a program can ask tells it. So the first allreduces of a size try each
// kind in turn, and the others take the kind whose best time was the shortest. A rank's
// choice is its own business: the bytes that are written are the same.
#ifndef KERAS_HVD_TF_OPS_COLLECTIVES_STORE_CHOICE_H_
#define KERAS_HVD_TF_OPS_COLLECTIVES_STORE_CHOICE_H_

#include <array>
#include <cstdint>

namespace keras_hvd {

enum class Stores {
  kOrdinary,
  kStreamingResult,  // what goes into the output
  kStreaming,        // that, and what goes into the exchange memory
};
inline constexpr int kStoresKinds = 3;

class StoreChoice {
 public:
  // The stores for the next allreduce of so many bytes.
  Stores Choose(int64_t bytes) const;
  // How long it took with what was chosen.
  void Learn(int64_t bytes, Stores stores, double seconds);

 private:
  // Each kind is tried so often: once may have met page faults, or a late peer.
  static constexpr int kTrials = 5;
  // Sizes that differ by less than a factor of two share their choice.
  static constexpr int kClasses = 64;

  struct Class {
    int trials = 0;
    std::array<double, kStoresKinds> best_seconds_per_byte{};
  };
  static int ClassOf(int64_t bytes);

  std::array<Class, kClasses> classes_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COLLECTIVES_STORE_CHOICE_H_
