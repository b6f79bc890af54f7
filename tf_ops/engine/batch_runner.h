// Runs one batch: passes its tensors to the collective of their kind.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "tf_ops/backend/collective_backend.h"
#include "tf_ops/backend/world.h"
#include "tf_ops/collectives/communicator.h"
#include "tf_ops/cuda/profiler_ranges.h"
#include "tf_ops/engine/engine_options.h"
#include "tf_ops/gpu/gpu_runner.h"
#include "tf_ops/operation/operation.h"
#include "tf_ops/timeline/timeline.h"

namespace keras_hvd {

class BatchRunner {
 public:
  BatchRunner(const EngineOptions& options, const World& world,
              std::shared_ptr<GpuAccess> gpu, Waiter* waiter, Timeline* timeline);

  // Runs batch `number` with the members of its process set. All members number batches
  // alike. `results` holds the results if the coordinator has sent them; see
  // inline_tensors.h. Returns false if the job has failed or this rank stops waiting.
  bool Run(const Batch& batch, const std::vector<int>& members, uint64_t number,
           const Tuning& tuning, const std::optional<std::string_view>& results);

  // Adds a process set on all ranks. `number`, `tuning`: as in a batch of all ranks.
  bool AddProcessSet(int32_t id, const std::vector<int>& members,
                     const std::vector<int>& all, uint64_t number,
                     const Tuning& tuning);

  // Runs the batches whose tensors are on GPUs.
  GpuRunner& gpu() { return gpu_; }
  const GpuRunner& gpu() const { return gpu_; }

  // The largest part of a tensor that is moved at once.
  int64_t window_bytes() const { return backend_->window_bytes(); }

 private:
  class Host;

  bool RunAnywhere(const Batch& batch, const std::vector<int>& members, uint64_t number,
                   const Tuning& tuning, bool recorded);
  bool TakeResults(const Batch& batch, const std::vector<int>& members, uint64_t number,
                   std::string_view results, PhaseRecorder* recorder);
  bool checks() const;
  bool CheckOutputs(const Batch& batch, const std::vector<int>& members);

  const std::shared_ptr<JobState> job_;
  const int rank_;
  const int64_t most_inline_bytes_;
  // Null if no profiler shows them.
  const std::unique_ptr<const cuda::ProfilerRanges> ranges_;
  Timeline& timeline_;
  const std::unique_ptr<CollectiveBackend> backend_;
  GpuRunner gpu_;
};

}  // namespace keras_hvd
