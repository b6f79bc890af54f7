// How many cores a job may use on this host.
#pragma once

#include <string>

#include "tf_ops/transport/segment.h"

namespace keras_hvd {

// Writes the cores that this process may run on into its block.
void PublishCores(RankBlock* block);

// The number of distinct cores that the ranks may run on together, limited by the
// quotas of this process's control groups. All ranks must have published their cores.
int CountCores(Segment* segment);

// How many cores' worth of time the control groups and their parents allow; infinite
// without a limit. `groups_file` is /proc/self/cgroup; `mount` is where the groups are
// mounted.
double QuotaCores(const std::string& groups_file, const std::string& mount);

}  // namespace keras_hvd
