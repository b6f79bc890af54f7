// See cores.h.
#include "tf_ops/transport/cores.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>

namespace keras_hvd {
namespace {

// Cores that the cgroup's quota amounts to; a large number where there is none.
int QuotaCores() {
  constexpr int kUnlimited = 1 << 20;
  std::ifstream unified("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (unified >> quota >> period) {
    if (quota == "max" || period <= 0) return kUnlimited;
    return std::max(1, static_cast<int>(std::ceil(std::stod(quota) / period)));
  }
  std::ifstream quota_file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream period_file("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double microseconds = 0;
  if (!(quota_file >> microseconds) || !(period_file >> period)) return kUnlimited;
  if (microseconds <= 0 || period <= 0) return kUnlimited;
  return std::max(1, static_cast<int>(std::ceil(microseconds / period)));
}

}  // namespace

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
  return std::min(std::max(1, CPU_COUNT(&all)), QuotaCores());
}

}  // namespace keras_hvd
