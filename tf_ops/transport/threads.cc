#include "tf_ops/transport/threads.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <new>
#include <system_error>
#include <utility>

#include "tf_ops/transport/control_groups.h"

namespace keras_hvd {
namespace {

// Short texts need no memory.
constexpr char kOutOfMemory[] = "out of memory";

// "" if this group has room, or no limit.
std::string WhyGroupIsFull(const std::string& folder) {
  int64_t most = 0, now = 0;
  if (!(std::ifstream(folder + "/pids.max") >> most)) return "";  // "max", or no file
  if (!(std::ifstream(folder + "/pids.current") >> now) || now < most) return "";
  return "the control group " + folder + " has " + std::to_string(now) +
         " processes and threads, and may have " + std::to_string(most) +
         " (pids.max; docker run --pids-limit; Kubernetes: podPidsLimit)";
}

}  // namespace

std::thread StartThread(const char* name, std::function<void()> body) {
  std::thread thread(std::move(body));
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

Status StatusOf(const std::exception& error) noexcept try {
  const auto* refused = dynamic_cast<const std::system_error*>(&error);
  if (refused != nullptr &&
      refused->code() == std::errc::resource_unavailable_try_again) {
    return Status::Internal(WhyNoThread());
  }
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    return Status::Internal(kOutOfMemory);
  }
  return Status::Internal(error.what());
} catch (const std::bad_alloc&) {
  return Status::Internal(kOutOfMemory);
}

std::string WhyNoThread(const std::string& groups_file, const std::string& mount) {
  const std::string text = "the system has no room for another thread: ";
  for (const std::string& folder : ControlGroups("pids", groups_file, mount)) {
    const std::string full = WhyGroupIsFull(folder);
    if (!full.empty()) return text + full;
  }
  rlimit limit = {};
  getrlimit(RLIMIT_NPROC, &limit);
  if (limit.rlim_cur != RLIM_INFINITY) {
    return text + "user " + std::to_string(getuid()) + " may have " +
           std::to_string(limit.rlim_cur) +
           " processes and threads (RLIMIT_NPROC; ulimit -u)";
  }
  return text +
         "see ulimit -v, /proc/sys/kernel/threads-max and /proc/sys/kernel/pid_max";
}

}  // namespace keras_hvd
