// Which instructions the loops over elements use.
//
// One library serves all processors: each loop is compiled several times, by target
// attributes on its functions rather than by compiler flags, which would let such
// instructions slip into code that every processor runs.
#ifndef KERAS_HVD_TF_OPS_COLLECTIVES_PROCESSOR_H_
#define KERAS_HVD_TF_OPS_COLLECTIVES_PROCESSOR_H_

#include <vector>

namespace keras_hvd {

enum class InstructionSet {
  kBaseline,  // what every processor of the architecture has: SSE2 on x86-64
  kAvx2,      // AVX2 and F16C
  kAvx512,    // AVX-512 F, BW, DQ and VL
};

// The best that this processor has.
InstructionSet BestInstructionSet();
// All that this processor has, the baseline first.
std::vector<InstructionSet> InstructionSets();

// What a loop's functions are marked with. Helpers that they call are inlined into
// them, since a function of another target cannot be.
#define KHVD_INLINE inline __attribute__((always_inline))
#if defined(__x86_64__)
// ThreadSanitizer does not see streaming stores, so there are none under it.
#if !defined(__SANITIZE_THREAD__)
#define KHVD_STREAMING_STORES
#endif
#define KHVD_TARGET_AVX2 __attribute__((target("avx2,f16c")))
#define KHVD_TARGET_AVX512                                                 \
  __attribute__((                                                          \
      target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,prefer-vector-" \
             "width=512")))
#endif

// Sets the floating-point environment that the language starts with (round to nearest,
// subnormal numbers kept) for as long as it lives: the thread may come from a framework
// that has changed its own, and results must not depend on who computes them.
class StandardFloatingPoint {
 public:
  StandardFloatingPoint();
  ~StandardFloatingPoint();
  StandardFloatingPoint(const StandardFloatingPoint&) = delete;
  StandardFloatingPoint& operator=(const StandardFloatingPoint&) = delete;

 private:
  unsigned int saved_ = 0;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COLLECTIVES_PROCESSOR_H_
