// See processor.h.
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#include <sys/prctl.h>

#include "tf_ops/collectives/processor.h"
#include "tf_ops/collectives/stream_aarch64.h"

namespace keras_hvd {
namespace {

constexpr int kNeonBytes = 16;

// The length of this thread's vectors; the system sets the same for all threads.
int SveBytes() {
  if ((getauxval(AT_HWCAP) & HWCAP_SVE) == 0) return 0;
  const int length = prctl(PR_SVE_GET_VL);
  return length < 0 ? 0 : length & PR_SVE_VL_LEN_MASK;
}

}  // namespace

std::vector<InstructionSet> InstructionSets() {
  std::vector<InstructionSet> sets = {InstructionSet::kBaseline};
  // If SVE vectors are as short as NEON's, SVE processes no more of them per cycle.
  if (SveBytes() > kNeonBytes) sets.push_back(InstructionSet::kSve);
  return sets;
}

// ---- Streaming stores

void StreamLines(char* to, const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += sizeof(StreamedVector)) {
    StreamVector(reinterpret_cast<StreamedVector*>(to + i),
                 vld1q_u8(reinterpret_cast<const uint8_t*>(from + i)));
  }
}

// A store-release comes after all stores of its thread, including streaming ones.
void StoreFence() {}

// ---- Other instructions

// `yield` is meant for this, but processors treat it as a no-op; `isb` takes about ten
// cycles.
void SpinPause() { asm volatile("isb" ::: "memory"); }

namespace {

// Round to nearest, no traps, keep subnormals and NaN payloads, IEEE half precision.
constexpr uint64_t kStandardControl = 0;

uint64_t Control() {
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  return control;
}

// The memory clobber keeps the compiler from moving computations across this.
void SetControl(uint64_t control) {
  asm volatile("msr fpcr, %0" ::"r"(control) : "memory");
}

}  // namespace

StandardFloatingPoint::StandardFloatingPoint() : saved_(Control()) {
  SetControl(kStandardControl);
}
StandardFloatingPoint::~StandardFloatingPoint() { SetControl(saved_); }

}  // namespace keras_hvd
