// Numbers that distinguish the requests of different ops; see submitter.h.
#include "tf_ops/kernels/submitter.h"

#include <atomic>

namespace keras_hvd {

uint64_t NextSubmitter() {
  // 0 is reserved for callers of the C API without a submitter of their own.
  static std::atomic<uint64_t> last{0};
  return ++last;
}

uint64_t SubmitterInCall(uint64_t op, uint64_t call) {
  // An odd factor keeps different ops apart in the same call.
  return op * 0x9E3779B97F4A7C15 ^ call;
}

}  // namespace keras_hvd
