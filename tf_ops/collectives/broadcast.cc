#include "tf_ops/collectives/broadcast.h"

#include <algorithm>
#include <cstring>

namespace keras_hvd {

bool Broadcast(const BroadcastOptions& options, Communicator* communicator) {
  const bool is_root = communicator->index() == options.root;
  if (is_root && options.output != options.input && options.bytes > 0) {
    memcpy(options.output, options.input, options.bytes);
  }
  if (communicator->count() == 1) return true;

  const int64_t window = communicator->window_bytes();
  for (int64_t begin = 0; begin < options.bytes; begin += window) {
    if (begin > 0 && !communicator->NextRound()) return false;
    const int64_t part = std::min(window, options.bytes - begin);
    if (is_root) {
      // Two windows are in flight: this one takes the place of the last but one.
      if (begin >= 2 * window && !communicator->AwaitAllPublished(2)) return false;
      communicator->Enter(CollectivePhase::kCopyIn);
      memcpy(communicator->ExchangeMemory(options.root),
             static_cast<const char*>(options.input) + begin, part);
    } else {
      if (!communicator->AwaitPublished(options.root)) return false;
      communicator->Enter(CollectivePhase::kCopyOut);
      memcpy(static_cast<char*>(options.output) + begin,
             communicator->ExchangeMemory(options.root), part);
    }
    communicator->Publish();
  }
  return true;
}

}  // namespace keras_hvd
