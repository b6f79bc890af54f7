// See copy.h.
#include "tf_ops/collectives/copy.h"

#include <algorithm>
#include <cstring>

#include "tf_ops/collectives/processor.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace keras_hvd {

void CopyOrdinary(char* to, const char* from, int64_t bytes) {
  // An empty tensor may have no address, which memcpy does not take even for no bytes.
  if (bytes > 0) memcpy(to, from, bytes);
}

#ifdef KHVD_STREAMING_STORES
namespace {

constexpr int64_t kLine = 64;

// Each copies whole lines; `to` is aligned to one.
void StreamBaseline(char* to, const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) {
    for (int64_t j = i; j < i + kLine; j += sizeof(__m128i)) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + j),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
    }
  }
}

KHVD_TARGET_AVX2 void StreamAvx2(char* to, const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) {
    for (int64_t j = i; j < i + kLine; j += sizeof(__m256i)) {
      _mm256_stream_si256(
          reinterpret_cast<__m256i*>(to + j),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + j)));
    }
  }
}

KHVD_TARGET_AVX512 void StreamAvx512(char* to, const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i),
                        _mm512_loadu_si512(from + i));
  }
}

}  // namespace

void CopyStreaming(char* to, const char* from, int64_t bytes) {
  const int64_t past_line = reinterpret_cast<intptr_t>(to) % kLine;
  const int64_t head = std::min(bytes, (kLine - past_line) % kLine);
  const int64_t lines = (bytes - head) / kLine * kLine;
  CopyOrdinary(to, from, head);
  switch (BestInstructionSet()) {
    case InstructionSet::kBaseline:
      StreamBaseline(to + head, from + head, lines);
      break;
    case InstructionSet::kAvx2:
      StreamAvx2(to + head, from + head, lines);
      break;
    case InstructionSet::kAvx512:
      StreamAvx512(to + head, from + head, lines);
      break;
  }
  CopyOrdinary(to + head + lines, from + head + lines, bytes - head - lines);
}

void StoreFence() { _mm_sfence(); }
#else
void CopyStreaming(char* to, const char* from, int64_t bytes) {
  CopyOrdinary(to, from, bytes);
}

void StoreFence() {}
#endif

}  // namespace keras_hvd
