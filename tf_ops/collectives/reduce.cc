// See reduce.h.
#include "tf_ops/collectives/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>
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

constexpr int64_t kLine = 64;

// A job whose result goes to two places.
struct TwofoldJob {
  Job job;  // `result` is the output
  void* exchange;
  Stores stores;
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
#define KHVD_VECTOR_BYTES 16
#define KHVD_VECTOR __m128i
#define KHVD_STREAM _mm_stream_si128
#include "tf_ops/collectives/reduce_loops.h"
#undef KHVD_NAMESPACE
#undef KHVD_TARGET
#undef KHVD_VECTOR_BYTES
#undef KHVD_VECTOR
#undef KHVD_STREAM

#if defined(__x86_64__)
#define KHVD_F16C

#define KHVD_NAMESPACE avx2
#define KHVD_TARGET KHVD_TARGET_AVX2
#define KHVD_VECTOR_BYTES 32
#define KHVD_VECTOR __m256i
#define KHVD_STREAM _mm256_stream_si256
#include "tf_ops/collectives/reduce_loops.h"
#undef KHVD_NAMESPACE
#undef KHVD_TARGET
#undef KHVD_VECTOR_BYTES
#undef KHVD_VECTOR
#undef KHVD_STREAM

#define KHVD_NAMESPACE avx512
#define KHVD_TARGET KHVD_TARGET_AVX512
#define KHVD_VECTOR_BYTES 64
#define KHVD_VECTOR __m512i
#define KHVD_STREAM _mm512_stream_si512
#include "tf_ops/collectives/reduce_loops.h"
#undef KHVD_NAMESPACE
#undef KHVD_TARGET
#undef KHVD_VECTOR_BYTES
#undef KHVD_VECTOR
#undef KHVD_STREAM
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

bool ReduceToBoth(const Reduction& reduction, DataType dtype, const void* const* inputs,
                  int count, int64_t elements, Stores stores, void* exchange,
                  void* output, InstructionSet instructions) {
  const bool adds =
      reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAverage;
  if (!adds || (dtype != DataType::kFloat32 && dtype != DataType::kFloat64)) {
    return false;
  }
  const auto past_line = [](void* place) {
    return reinterpret_cast<uintptr_t>(place) % kLine;
  };
  if (stores != Stores::kOrdinary && past_line(output) != 0) return false;
  if (stores == Stores::kStreaming && past_line(exchange) != 0) return false;
  TwofoldJob twofold = {
      {inputs, count, elements, output, reduction.prescale, reduction.postscale},
      exchange,
      stores};
  if (reduction.op == ReduceOp::kAverage) twofold.job.postscale /= count;
  switch (instructions) {
#if defined(__x86_64__)
    case InstructionSet::kAvx512:
      avx512::AddToBoth(dtype, twofold);
      break;
    case InstructionSet::kAvx2:
      avx2::AddToBoth(dtype, twofold);
      break;
#endif
    default:
      baseline::AddToBoth(dtype, twofold);
      break;
  }
  return true;
}

bool Supports(const Reduction& reduction, DataType dtype) {
  if (!IsReduced(dtype)) return false;
  if (reduction.op == ReduceOp::kAdasum) return IsFloating(dtype);
  // Infinity times 0 is no number, and an integer type has none but numbers.
  if (IsInteger(dtype)) {
    return std::isfinite(reduction.prescale) && std::isfinite(reduction.postscale);
  }
  if (dtype != DataType::kBool) return true;
  const bool sums =
      reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAverage;
  return !sums && reduction.prescale == 1 && reduction.postscale == 1;
}

}  // namespace keras_hvd
