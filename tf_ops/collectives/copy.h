// Copies with ordinary stores or with streaming ones.
//
// An ordinary store first reads the cache line that it changes; a streaming store goes
// past the caches to memory. Which is faster depends on the machine, the cores and on
// how much is copied; see store_choice.h.
#ifndef KERAS_HVD_TF_OPS_COLLECTIVES_COPY_H_
#define KERAS_HVD_TF_OPS_COLLECTIVES_COPY_H_

#include <cstdint>

#include "tf_ops/collectives/processor.h"

namespace keras_hvd {

enum class Stores {
  kOrdinary,
  kStreamingResult,  // what goes into the output
  kStreaming,        // that, and what goes into the exchange memory
};
inline constexpr int kStoresKinds = 3;

void CopyOrdinary(char* to, const char* from, int64_t bytes);

// What it has written may be published only after StoreFence(): not on every processor
// does a store-release order streaming stores.
void CopyStreaming(char* to, const char* from, int64_t bytes);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COLLECTIVES_COPY_H_
