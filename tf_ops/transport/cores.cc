#include "tf_ops/transport/cores.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>

#include "tf_ops/transport/control_groups.h"

namespace keras_hvd {
namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

// Version 2 has "max 100000" or "150000 100000" in one file. Version 1 has one number
// in each of two files.
double Limit(const std::string& quota_file, const std::string& period_file) {
  std::ifstream quota_stream(quota_file);
  std::string quota;
  if (!(quota_stream >> quota) || quota == "max" || quota == "-1") return kUnlimited;
  double period = 0;
  if (period_file.empty()) {
    quota_stream >> period;
  } else {
    std::ifstream(period_file) >> period;
  }
  return period > 0 ? std::stod(quota) / period : kUnlimited;
}

double LimitOfGroup(const std::string& folder) {
  return std::min(Limit(folder + "/cpu.max", ""),
                  Limit(folder + "/cpu.cfs_quota_us", folder + "/cpu.cfs_period_us"));
}

}  // namespace

double QuotaCores(const std::string& groups_file, const std::string& mount) {
  double limit = kUnlimited;
  for (const std::string& folder : ControlGroups("cpu", groups_file, mount)) {
    limit = std::min(limit, LimitOfGroup(folder));
  }
  return limit;
}

void PublishCores(RankBlock* block) {
  CPU_ZERO(&block->cpus);
  sched_getaffinity(0, sizeof(block->cpus), &block->cpus);
}

int CountCores(Segment* segment) {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int rank = 0; rank < segment->size(); ++rank) {
    CPU_OR(&all, &all, &segment->block(rank).cpus);
  }
  const double quota = std::ceil(QuotaCores("/proc/self/cgroup", "/sys/fs/cgroup"));
  return static_cast<int>(std::max(1.0, std::min<double>(CPU_COUNT(&all), quota)));
}

}  // namespace keras_hvd
