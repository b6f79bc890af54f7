// This process' handlers for crashes and forks, which last across all its worlds.
#pragma once

#include <vector>

#include "tf_ops/transport/segment.h"

namespace keras_hvd {

// From now on a crash is noted in `block` and ends `connections`, whose other ends may
// have no other way to hear of it, and a forked child closes them. They replace those
// of the world before.
void EnterWorld(RankBlock* block, const std::vector<int>& connections);
// Call before either of them goes away. Changes nothing if the process has entered
// another world since.
void LeaveWorld(RankBlock* block);

// Whether this process was forked from one that is or was a rank. It cannot be a rank.
bool IsForked();

}  // namespace keras_hvd
