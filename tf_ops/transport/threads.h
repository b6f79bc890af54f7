// Starts threads, and describes exceptions that no caller may see: that there is no
// room for a thread, or no memory.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <thread>

#include "tf_ops/transport/status.h"

namespace keras_hvd {

// Starts a thread with a name of up to 15 letters. Raises std::system_error if the
// system has no room for it.
std::thread StartThread(const char* name, std::function<void()> body);

// An error for an exception, in particular for those of StartThread and for
// std::bad_alloc. Raises none itself.
Status StatusOf(const std::exception& error) noexcept;

// The limit that leaves no room for another thread, as far as the system tells, with
// advice. The files are those of ControlGroups.
std::string WhyNoThread(const std::string& groups_file = "/proc/self/cgroup",
                        const std::string& mount = "/sys/fs/cgroup");

}  // namespace keras_hvd
