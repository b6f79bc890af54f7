// The options of an engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "tf_ops/coordination/autotune.h"
#include "tf_ops/gpu/gpu_access.h"

namespace keras_hvd {

struct EngineOptions {
  int64_t fusion_bytes = 64 << 20;
  double stall_warning_seconds = 60;  // negative: never
  double stall_abort_seconds = 0;     // 0: never
  int cores = 1;                      // shared by the ranks of this host
  bool check = false;             // compare all outputs; the coordinator's value counts
  size_t cache_capacity = 16384;  // names that travel as numbers
  AutotuneOptions autotune;       // the coordinator's value counts
  int local_rank = 0;
  int32_t last_earlier_set = 0;  // highest number of a process set of earlier jobs
  GpuLibraries gpu_libraries;
  std::string nvtx_library;  // "": the system's
  bool ranges = true;        // for profilers, if there is one
};

}  // namespace keras_hvd
