// Copies with ordinary stores or with streaming ones.
//
// An ordinary store first reads the cache line that it changes; a streaming store
// bypasses the caches. The faster kind depends on the machine, the cores and the amount
// copied; see store_choice.h.
#pragma once

#include <cstdint>

#include "tf_ops/collectives/processor.h"

namespace keras_hvd {

enum class Stores {
  kOrdinary,
  kStreamingResult,  // the output
  kStreaming,        // the output and the exchange memory
};
inline constexpr int kStoresKinds = 3;

void CopyOrdinary(char* to, const char* from, int64_t bytes);

// Call StoreFence() before publishing the data: on some processors a store-release does
// not order streaming stores.
void CopyStreaming(char* to, const char* from, int64_t bytes);

}  // namespace keras_hvd
