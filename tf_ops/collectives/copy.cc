#include "tf_ops/collectives/copy.h"

#include <algorithm>
#include <cstring>

namespace keras_hvd {

void CopyOrdinary(char* to, const char* from, int64_t bytes) {
  // An empty tensor may have no address, and memcpy forbids null even for no bytes.
  if (bytes > 0) memcpy(to, from, bytes);
}

void CopyStreaming(char* to, const char* from, int64_t bytes) {
  if constexpr (!kHasStreamingStores) return CopyOrdinary(to, from, bytes);
  const int64_t past_line = reinterpret_cast<intptr_t>(to) % kCacheLine;
  const int64_t head = std::min(bytes, (kCacheLine - past_line) % kCacheLine);
  const int64_t lines = (bytes - head) / kCacheLine * kCacheLine;
  CopyOrdinary(to, from, head);
  StreamLines(to + head, from + head, lines);
  CopyOrdinary(to + head + lines, from + head + lines, bytes - head - lines);
}

}  // namespace keras_hvd
