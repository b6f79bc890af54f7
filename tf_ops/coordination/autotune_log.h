// The coordinator's file of autotuning results, for people, for spreadsheets, and for
// the next job.
//
//   keras_hvd autotune 2: ranks=2 state=result
//   fusion_bytes,window_bytes,small_bytes,spin_microseconds,halving_hosts,...,stage
//   67108864,524288,16384,50,12,,best
//   67108864,1048576,16384,50,12,1234567890,warmup
//   ...
//
// The state is `search` until there is a result. The best comes first, then each sample
// in the order in which they were taken: `warmup`, `search` or `final`.
#pragma once

#include <string>

#include "tf_ops/coordination/autotune.h"
#include "tf_ops/transport/status.h"

namespace keras_hvd {

// Reads the settings in `options->log`, from an earlier job with `ranks` ranks, into
// `options`. Leaves `options` unchanged if there is no file, or an empty one, or it is
// for another number of ranks. Returns an error if the file is something else, which
// would be overwritten, or cannot be written.
Status ReadAutotuneLog(int ranks, AutotuneOptions* options);

// Replaces the file by a complete new one.
Status WriteAutotuneLog(const std::string& path, int ranks, const Autotune& autotune);

}  // namespace keras_hvd
