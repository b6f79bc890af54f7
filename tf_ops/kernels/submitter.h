// Numbers that distinguish the requests of different ops.
#pragma once

#include <atomic>
#include <cstdint>

namespace keras_hvd {

// A number that no other op of this process has.
inline uint64_t NextSubmitter() {
  // 0 is reserved for callers of the C API without a submitter of their own.
  static std::atomic<uint64_t> last{0};
  return ++last;
}

// Identifies an op in one call of its function; `call` is TensorFlow's number of the
// step. Requests of one op in one call may queue under one name, as in a loop. Requests
// of two ops may not, nor those of two simultaneous calls, since their order may differ
// between ranks.
inline uint64_t SubmitterInCall(uint64_t op, uint64_t call) {
  // An odd factor keeps different ops apart in the same call.
  return op * 0x9E3779B97F4A7C15 ^ call;
}

}  // namespace keras_hvd
