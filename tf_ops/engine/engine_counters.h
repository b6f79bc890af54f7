// An engine's counters, which any thread may read.
#ifndef KERAS_HVD_TF_OPS_ENGINE_ENGINE_COUNTERS_H_
#define KERAS_HVD_TF_OPS_ENGINE_ENGINE_COUNTERS_H_

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

#endif  // KERAS_HVD_TF_OPS_ENGINE_ENGINE_COUNTERS_H_
