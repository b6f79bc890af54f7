// What lasts for this process, through all worlds that it is in: its handlers of
// crashes and of forks.
#ifndef KERAS_HVD_TF_OPS_ENGINE_PROCESS_H_
#define KERAS_HVD_TF_OPS_ENGINE_PROCESS_H_

#include <vector>

#include "tf_ops/transport/segment.h"

namespace keras_hvd {

// From now on a crash is noted in `block`, and a forked child closes `connections`.
void EnterWorld(RankBlock* block, const std::vector<int>& connections);
// Before either of them goes away.
void LeaveWorld();

// Whether this process was forked from one that is or was a rank; it cannot be one.
bool IsForked();

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_ENGINE_PROCESS_H_
