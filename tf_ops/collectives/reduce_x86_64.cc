// The loops of a reduction for x86-64 processors. See reduce_job.h.
#include <immintrin.h>

#include "tf_ops/collectives/number.h"
#include "tf_ops/collectives/reduce_job.h"

#define KHVD_NAMESPACE baseline
#define KHVD_TARGET
#define KHVD_VECTOR __m128i
#define KHVD_STREAM _mm_stream_si128
#include "tf_ops/collectives/reduce_loops.h"

namespace keras_hvd {
namespace {

#define KHVD_F16C KHVD_INLINE __attribute__((target("avx2,f16c")))

KHVD_F16C void WidenHalves(const Float16* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
  for (; i < n; ++i) to[i] = _cvtsh_ss(from[i].bits);
}

KHVD_F16C void NarrowToHalves(const float* from, int64_t n, Float16* to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves =
        _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  for (; i < n; ++i) to[i].bits = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
}

}  // namespace
}  // namespace keras_hvd

#define KHVD_CONVERTS_HALVES

#define KHVD_NAMESPACE avx2
#define KHVD_TARGET __attribute__((target("avx2,f16c")))
#define KHVD_VECTOR __m256i
#define KHVD_STREAM _mm256_stream_si256
#include "tf_ops/collectives/reduce_loops.h"

#define KHVD_NAMESPACE avx512
#define KHVD_TARGET                                                        \
  __attribute__((                                                          \
      target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,prefer-vector-" \
             "width=512")))
#define KHVD_VECTOR __m512i
#define KHVD_STREAM _mm512_stream_si512
#include "tf_ops/collectives/reduce_loops.h"

namespace keras_hvd {

void RunLoops(InstructionSet instructions, ReduceOp op, DataType dtype,
              const ReduceJob& job) {
  switch (instructions) {
    case InstructionSet::kAvx512: return avx512::Reduce(op, dtype, job);
    case InstructionSet::kAvx2: return avx2::Reduce(op, dtype, job);
    default: return baseline::Reduce(op, dtype, job);
  }
}

void RunTwofoldLoops(InstructionSet instructions, DataType dtype,
                     const TwofoldJob& twofold) {
  switch (instructions) {
    case InstructionSet::kAvx512: return avx512::AddToBoth(dtype, twofold);
    case InstructionSet::kAvx2: return avx2::AddToBoth(dtype, twofold);
    default: return baseline::AddToBoth(dtype, twofold);
  }
}

}  // namespace keras_hvd
