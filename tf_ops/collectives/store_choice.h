// Chooses the stores that an allreduce of some size writes with, by trying them.
//
// Which are fastest depends on the machine, on where the ranks run, and on the size;
// nothing that a program can ask tells it, and where a virtual machine's processors are
// moved it changes by a factor of five while the program runs. So every kind is tried
// at first, the fastest is used, and the others are tried again from time to time: the
// slower one was, the more rarely.
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
  // Sizes that differ by less than a factor of two share their experience, and so do
  // all from 64 MiB up, which no cache holds.
  static constexpr int kLargestClass = 26;

  struct Experience {
    int64_t trials = 0;
    int64_t last_trial = 0;       // by the count of the class
    double seconds_per_byte = 0;  // falls with a better time at once, rises slowly
  };
  struct Class {
    int64_t count = 0;
    std::array<Experience, kStoresKinds> kinds;
  };

  static int ClassOf(int64_t bytes);

  std::array<Class, kLargestClass + 1> classes_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COLLECTIVES_STORE_CHOICE_H_
