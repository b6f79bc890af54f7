// An engine's counters, which any thread may read.
#pragma once

#include <atomic>
#include <cstdint>

namespace keras_hvd {

struct EngineCounters {
  std::atomic<int64_t> batches{0};
  std::atomic<int64_t> tensors{0};
  std::atomic<int64_t> bytes{0};
  std::atomic<int64_t> sleeps{0};
  std::atomic<int64_t> lost_wakes{0};
  std::atomic<int64_t> tunings{0};  // changes of settings carried out
};

}  // namespace keras_hvd
