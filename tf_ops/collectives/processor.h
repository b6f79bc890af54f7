// What depends on the kind of processor: which instructions the loops over elements
// use, streaming stores, and the floating-point environment.
//
// One library serves all processors of a kind: each loop is compiled several times, by
// target attributes on its functions rather than by compiler flags, which would let
// such instructions slip into code that every processor runs. What is declared here is
// defined in processor_x86_64.cc and processor_aarch64.cc, of which one is built.
#ifndef KERAS_HVD_TF_OPS_COLLECTIVES_PROCESSOR_H_
#define KERAS_HVD_TF_OPS_COLLECTIVES_PROCESSOR_H_

#include <cstdint>
#include <vector>

namespace keras_hvd {

enum class InstructionSet {
  kBaseline,  // what every processor of the kind has: SSE2 on x86-64, NEON on aarch64
  kAvx2,      // x86-64: AVX2 and F16C
  kAvx512,    // x86-64: AVX-512 F, BW, DQ and VL
  kSve,       // aarch64: SVE, with vectors that are longer than NEON's
};

// The best that this processor has.
InstructionSet BestInstructionSet();
// All that this processor has, the baseline first.
std::vector<InstructionSet> InstructionSets();

// Helpers of the loops are inlined into them, since a function of another target cannot
// be called instead.
#define KHVD_INLINE inline __attribute__((always_inline))

// ThreadSanitizer does not see streaming stores, so there are none under it.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kHasStreamingStores = false;
#else
inline constexpr bool kHasStreamingStores = true;
#endif

// Of whole lines of 64 bytes; `to` is at the start of one. See copy.h.
void StreamLines(char* to, const char* from, int64_t bytes);
// Before what streaming stores have written is published, by a store-release.
void StoreFence();

// Tells the processor that this thread looks at the same word again and again.
void SpinPause();

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
  const uint64_t saved_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COLLECTIVES_PROCESSOR_H_
