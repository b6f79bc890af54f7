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

// The length of this thread's vectors; the system gives all threads the same.
int SveBytes() {
  if ((getauxval(AT_HWCAP) & HWCAP_SVE) == 0) return 0;
  const int length = prctl(PR_SVE_GET_VL);
  return length < 0 ? 0 : length & PR_SVE_VL_LEN_MASK;
}

}  // namespace

std::vector<InstructionSet> InstructionSets() {
  std::vector<InstructionSet> sets = {InstructionSet::kBaseline};
  // Where they are as long as NEON's, there are no more of them in a cycle either.
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

// A store-release is behind all stores of its thread, streaming ones too.
void StoreFence() {}

// ---- Other instructions

// What `yield` is for, but processors take that for nothing; this takes some ten
// cycles.
void SpinPause() { asm volatile("isb" ::: "memory"); }

namespace {

// Round to nearest, no traps, subnormal numbers and the payload of NaNs kept, IEEE's
// half precision.
constexpr uint64_t kStandardControl = 0;

uint64_t Control() {
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  return control;
}

// No computation is moved past it by the compiler, whose memory it may have changed.
void SetControl(uint64_t control) {
  asm volatile("msr fpcr, %0" ::"r"(control) : "memory");
}

}  // namespace

StandardFloatingPoint::StandardFloatingPoint() : saved_(Control()) {
  SetControl(kStandardControl);
}
StandardFloatingPoint::~StandardFloatingPoint() { SetControl(saved_); }

}  // namespace keras_hvd
