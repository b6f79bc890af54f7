// The parts that depend on the processor: the instruction sets that element loops use,
// streaming stores, and the floating-point environment.
//
// One library serves all processors of an architecture, so each loop is compiled
// several times. The functions have target attributes. Compiler flags would let such
// instructions slip into code that every processor runs. processor_x86_64.cc and
// processor_aarch64.cc define these functions. Only one of the two is built.
#pragma once

#include <cstdint>
#include <vector>

namespace keras_hvd {

enum class InstructionSet {
  kBaseline,  // the whole architecture: SSE2 on x86-64, NEON on aarch64
  kAvx2,      // x86-64: AVX2 and F16C
  kAvx512,    // x86-64: AVX-512 F, BW, DQ and VL
  kSve,       // aarch64: SVE, with vectors longer than NEON's
};

// The best instruction set of this processor.
InstructionSet BestInstructionSet();
// All instruction sets of this processor, the baseline first.
std::vector<InstructionSet> InstructionSets();

// The loops' helpers must be inlined, because a loop cannot call a function compiled
// for another target.
#define KHVD_INLINE inline __attribute__((always_inline))

// ThreadSanitizer does not see streaming stores, so its builds use none.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kHasStreamingStores = false;
#else
inline constexpr bool kHasStreamingStores = true;
#endif

inline constexpr int64_t kCacheLine = 64;
// Copies whole lines; `to` is aligned to a line. See copy.h.
void StreamLines(char* to, const char* from, int64_t bytes);
// Call it before a store-release publishes data written with streaming stores.
void StoreFence();

// Tells the processor that this thread is spinning on a word.
void SpinPause();

// Sets the language's initial floating-point environment (round to nearest, subnormal
// numbers kept) during its lifetime. The thread may come from a framework that changed
// its environment, and results must not depend on which thread computes them.
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
