// See processor.h.
#include "tf_ops/collectives/processor.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace keras_hvd {

std::vector<InstructionSet> InstructionSets() {
  std::vector<InstructionSet> sets = {InstructionSet::kBaseline};
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return sets;
  sets.push_back(InstructionSet::kAvx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    sets.push_back(InstructionSet::kAvx512);
  }
#endif
  return sets;
}

InstructionSet BestInstructionSet() {
  static const InstructionSet best = InstructionSets().back();
  return best;
}

#if defined(__x86_64__)
namespace {
// All exceptions masked, round to nearest, neither flush-to-zero nor
// denormals-are-zero.
constexpr unsigned int kStandardControl = 0x1F80;
}  // namespace

StandardFloatingPoint::StandardFloatingPoint() : saved_(_mm_getcsr()) {
  _mm_setcsr(kStandardControl);
}
StandardFloatingPoint::~StandardFloatingPoint() { _mm_setcsr(saved_); }
#else
StandardFloatingPoint::StandardFloatingPoint() = default;
StandardFloatingPoint::~StandardFloatingPoint() = default;
#endif

}  // namespace keras_hvd
