// What a rank does within a collective, for whoever keeps a record of it.
#ifndef KERAS_HVD_TF_OPS_COLLECTIVES_PHASE_RECORDER_H_
#define KERAS_HVD_TF_OPS_COLLECTIVES_PHASE_RECORDER_H_

#include <cstdint>

namespace keras_hvd {

enum class CollectivePhase : int32_t {
  kNone = 0,     // in between
  kCopyIn = 1,   // out of the tensors into the exchange memory
  kWait = 2,     // for other ranks
  kReduce = 3,   // where small tensors are reduced, their copy out is part of it
  kCopyOut = 4,  // out of the exchange memory into the results
};
inline constexpr int kCollectivePhases = 5;

class PhaseRecorder {
 public:
  virtual ~PhaseRecorder() = default;
  // From now on the rank does this, until it says something else, with the bytes
  // [begin, end) of what travels. It waits for the bytes that it named last.
  virtual void Enter(CollectivePhase phase, int64_t begin, int64_t end) = 0;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COLLECTIVES_PHASE_RECORDER_H_
