// The loops of a reduction for aarch64 processors. See reduce_job.h.
#include <arm_neon.h>

#include <cstring>

#include "tf_ops/collectives/number.h"
#include "tf_ops/collectives/reduce_job.h"
#include "tf_ops/collectives/stream_aarch64.h"

namespace keras_hvd {
namespace {

// Every processor has these instructions. They round as the control register says, here
// to nearest: see StandardFloatingPoint.
KHVD_INLINE void WidenHalves(const Float16* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const uint16x4_t bits = vld1_u16(reinterpret_cast<const uint16_t*>(from + i));
    vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u16(bits)));
  }
  for (; i < n; ++i) {
    __fp16 half;
    memcpy(&half, from + i, sizeof(half));
    to[i] = half;
  }
}

KHVD_INLINE void NarrowToHalves(const float* from, int64_t n, Float16* to) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const uint16x4_t bits = vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + i)));
    vst1_u16(reinterpret_cast<uint16_t*>(to + i), bits);
  }
  for (; i < n; ++i) {
    const __fp16 half = static_cast<__fp16>(from[i]);
    memcpy(to + i, &half, sizeof(half));
  }
}

}  // namespace
}  // namespace keras_hvd

#define KHVD_CONVERTS_HALVES

#define KHVD_NAMESPACE baseline
#define KHVD_TARGET
#define KHVD_VECTOR StreamedVector
#define KHVD_STREAM StreamVector
#include "tf_ops/collectives/reduce_loops.h"

#define KHVD_NAMESPACE sve
#define KHVD_TARGET __attribute__((target("+sve")))
#define KHVD_VECTOR StreamedVector
#define KHVD_STREAM StreamVector
#include "tf_ops/collectives/reduce_loops.h"

namespace keras_hvd {

void RunLoops(InstructionSet instructions, ReduceOp op, DataType dtype,
              const ReduceJob& job) {
  if (instructions == InstructionSet::kSve) return sve::Reduce(op, dtype, job);
  baseline::Reduce(op, dtype, job);
}

void RunTwofoldLoops(InstructionSet instructions, DataType dtype,
                     const TwofoldJob& twofold) {
  if (instructions == InstructionSet::kSve) return sve::AddToBoth(dtype, twofold);
  baseline::AddToBoth(dtype, twofold);
}

}  // namespace keras_hvd
