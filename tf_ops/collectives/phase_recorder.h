// Reports a rank's phases within a collective to a recorder.
#pragma once

#include <cstdint>

namespace keras_hvd {

enum class CollectivePhase : int32_t {
  kNone = 0,      // in between
  kCopyIn = 1,    // out of the tensors into the exchange memory
  kWait = 2,      // for other ranks
  kReduce = 3,    // for small tensors this includes their copy out
  kCopyOut = 4,   // out of the exchange memory into the results
  kExchange = 5,  // bytes are on their way to or from other hosts
};
inline constexpr int kCollectivePhases = 6;

class PhaseRecorder {
 public:
  virtual ~PhaseRecorder() = default;
  // The rank is in this phase until the next call, working on the bytes [begin, end) of
  // the data that travels. Waits and exchanges are for the bytes named last.
  virtual void Enter(CollectivePhase phase, int64_t begin, int64_t end) = 0;
};

}  // namespace keras_hvd
