// Streaming stores for aarch64. They store pairs of registers, with a hint that the
// data will not be needed soon.
#pragma once

#include <arm_neon.h>

#include "tf_ops/collectives/processor.h"

namespace keras_hvd {

typedef uint8x16_t StreamedVector __attribute__((may_alias));

// GCC has no intrinsic for this. It stores the two halves of one vector, because GCC
// splits vectors longer than the processor's into single numbers.
KHVD_INLINE void StreamVector(StreamedVector* to, StreamedVector vector) {
  asm("stnp %d1, %d2, %0"
      : "=Q"(*to)
      : "w"(vget_low_u8(vector)), "w"(vget_high_u8(vector)));
}

}  // namespace keras_hvd
