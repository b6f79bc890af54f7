// The jobs that Reduce() and ReduceToBoth() pass to the loops. Each architecture
// compiles the loops in its own file, reduce_x86_64.cc or reduce_aarch64.cc.
#pragma once

#include <cstdint>

#include "tf_ops/collectives/copy.h"
#include "tf_ops/collectives/dtype.h"
#include "tf_ops/collectives/processor.h"

namespace keras_hvd {

struct ReduceJob {
  const void* const* inputs;
  int count;
  int64_t elements;
  void* result;
  double prescale;
  double postscale;
};

// A job that writes its result to two places.
struct TwofoldJob {
  ReduceJob job;  // `result` is the output
  void* exchange;
  Stores stores;
};

// Averages the exact sum, which may not fit into the type. No processor has
// instructions for this.
template <typename T>
void AverageIntegers(const ReduceJob& job) {
  const auto* const* inputs = reinterpret_cast<const T* const*>(job.inputs);
  for (int64_t i = 0; i < job.elements; ++i) {
    __int128 sum = 0;
    for (int input = 0; input < job.count; ++input) sum += inputs[input][i];
    static_cast<T*>(job.result)[i] = static_cast<T>(sum / job.count);
  }
}

void RunLoops(InstructionSet instructions, ReduceOp op, DataType dtype,
              const ReduceJob& job);
// Sums of float32 or float64.
void RunTwofoldLoops(InstructionSet instructions, DataType dtype,
                     const TwofoldJob& twofold);

}  // namespace keras_hvd
