// Streaming stores of aarch64: of pairs of registers, of which the processor is told
// that they will not be needed soon.
#ifndef KERAS_HVD_TF_OPS_COLLECTIVES_STREAM_AARCH64_H_
#define KERAS_HVD_TF_OPS_COLLECTIVES_STREAM_AARCH64_H_

#include <arm_neon.h>

#include "tf_ops/collectives/processor.h"

namespace keras_hvd {

typedef uint8x16_t StreamedVector __attribute__((may_alias));

// GCC has no intrinsic for it. Of a vector's two halves: GCC takes vectors that are
// longer than the processor's apart, to single numbers.
KHVD_INLINE void StreamVector(StreamedVector* to, StreamedVector vector) {
  asm("stnp %d1, %d2, %0"
      : "=Q"(*to)
      : "w"(vget_low_u8(vector)), "w"(vget_high_u8(vector)));
}

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COLLECTIVES_STREAM_AARCH64_H_
