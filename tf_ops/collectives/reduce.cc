// See reduce.h.
#include "tf_ops/collectives/reduce.h"

#include <algorithm>
#include <type_traits>

#include "tf_ops/collectives/number.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace keras_hvd {
namespace {

struct Job {
  const void* const* inputs;
  int count;
  int64_t elements;
  void* result;
  double prescale;
  double postscale;
};

// The average is taken of the exact sum, which may not fit into the type.
template <typename T>
void AverageIntegers(const Job& job) {
  const auto* const* inputs = reinterpret_cast<const T* const*>(job.inputs);
  for (int64_t i = 0; i < job.elements; ++i) {
    __int128 sum = 0;
    for (int input = 0; input < job.count; ++input) sum += inputs[input][i];
    static_cast<T*>(job.result)[i] = static_cast<T>(sum / job.count);
  }
}

}  // namespace
}  // namespace keras_hvd

#define KHVD_NAMESPACE baseline
#define KHVD_TARGET
#include "tf_ops/collectives/reduce_loops.h"
#undef KHVD_NAMESPACE
#undef KHVD_TARGET

#if defined(__x86_64__)
#define KHVD_F16C

#define KHVD_NAMESPACE avx2
#define KHVD_TARGET KHVD_TARGET_AVX2
#include "tf_ops/collectives/reduce_loops.h"
#undef KHVD_NAMESPACE
#undef KHVD_TARGET

#define KHVD_NAMESPACE avx512
#define KHVD_TARGET KHVD_TARGET_AVX512
#include "tf_ops/collectives/reduce_loops.h"
#undef KHVD_NAMESPACE
#undef KHVD_TARGET
#endif

namespace keras_hvd {

void Reduce(const Reduction& reduction, DataType dtype, const void* const* inputs,
            int count, int64_t elements, void* result, InstructionSet instructions) {
  const Job job = {
      inputs, count, elements, result, reduction.prescale, reduction.postscale};
  switch (instructions) {
#if defined(__x86_64__)
    case InstructionSet::kAvx512:
      return avx512::Reduce(reduction.op, dtype, job);
    case InstructionSet::kAvx2:
      return avx2::Reduce(reduction.op, dtype, job);
#endif
    default:
      return baseline::Reduce(reduction.op, dtype, job);
  }
}

bool Supports(const Reduction& reduction, DataType dtype) {
  if (dtype != DataType::kBool) return true;
  const bool sums =
      reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAverage;
  return !sums && reduction.prescale == 1 && reduction.postscale == 1;
}

}  // namespace keras_hvd
