// See processor.h.
#include <immintrin.h>

#include "tf_ops/collectives/processor.h"

namespace keras_hvd {

std::vector<InstructionSet> InstructionSets() {
  std::vector<InstructionSet> sets = {InstructionSet::kBaseline};
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return sets;
  sets.push_back(InstructionSet::kAvx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    sets.push_back(InstructionSet::kAvx512);
  }
  return sets;
}

// ---- Streaming stores

namespace {

void StreamBaseline(char* to, const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kCacheLine) {
    for (int64_t j = i; j < i + kCacheLine; j += sizeof(__m128i)) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + j),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
    }
  }
}

__attribute__((target("avx2"))) void StreamAvx2(char* to, const char* from,
                                                int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kCacheLine) {
    for (int64_t j = i; j < i + kCacheLine; j += sizeof(__m256i)) {
      _mm256_stream_si256(
          reinterpret_cast<__m256i*>(to + j),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + j)));
    }
  }
}

__attribute__((target("avx512f"))) void StreamAvx512(char* to, const char* from,
                                                     int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kCacheLine) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i),
                        _mm512_loadu_si512(from + i));
  }
}

}  // namespace

void StreamLines(char* to, const char* from, int64_t bytes) {
  switch (BestInstructionSet()) {
    case InstructionSet::kAvx512: return StreamAvx512(to, from, bytes);
    case InstructionSet::kAvx2: return StreamAvx2(to, from, bytes);
    default: return StreamBaseline(to, from, bytes);
  }
}

// Nothing else orders streaming stores, not even a store-release.
void StoreFence() { _mm_sfence(); }

// ---- Other instructions

void SpinPause() { _mm_pause(); }

// All exceptions masked, round to nearest, neither flush-to-zero nor
// denormals-are-zero.
constexpr unsigned int kStandardControl = 0x1F80;

StandardFloatingPoint::StandardFloatingPoint() : saved_(_mm_getcsr()) {
  _mm_setcsr(kStandardControl);
}
StandardFloatingPoint::~StandardFloatingPoint() {
  _mm_setcsr(static_cast<unsigned int>(saved_));
}

}  // namespace keras_hvd
