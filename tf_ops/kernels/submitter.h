// Numbers that distinguish the requests of different ops.
#pragma once

#include <cstdint>

namespace keras_hvd {

// A number that no other op of this process has.
uint64_t NextSubmitter();

// Identifies an op in one call of its function; `call` is TensorFlow's number of the
// step. Requests of one op in one call may queue under one name, as in a loop. Requests
// of two ops may not, nor those of two simultaneous calls, since their order may differ
// between ranks.
uint64_t SubmitterInCall(uint64_t op, uint64_t call);

}  // namespace keras_hvd
