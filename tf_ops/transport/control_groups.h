// The control groups of this process, which limit its resources.
#pragma once

#include <string>
#include <vector>

namespace keras_hvd {

// Folders that may have files of a controller ("cpu", "pids"): of the process' groups
// and their parents, in versions 1 and 2. Some may not exist. `groups_file` is
// /proc/self/cgroup, `mount` /sys/fs/cgroup, except in tests.
std::vector<std::string> ControlGroups(const std::string& controller,
                                       const std::string& groups_file,
                                       const std::string& mount);

}  // namespace keras_hvd
