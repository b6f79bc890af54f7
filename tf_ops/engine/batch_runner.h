// Runs one batch: hands its tensors to the collective of their kind.
#ifndef KERAS_HVD_TF_OPS_ENGINE_BATCH_RUNNER_H_
#define KERAS_HVD_TF_OPS_ENGINE_BATCH_RUNNER_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "tf_ops/collectives/allreduce.h"
#include "tf_ops/collectives/communicator.h"
#include "tf_ops/cuda/profiler_ranges.h"
#include "tf_ops/engine/autotune.h"
#include "tf_ops/engine/coordination.h"
#include "tf_ops/engine/engine_options.h"
#include "tf_ops/engine/gpu_runner.h"
#include "tf_ops/engine/operation.h"
#include "tf_ops/engine/timeline.h"
#include "tf_ops/transport/world.h"

namespace keras_hvd {

// What rank 0 has decided for all: the same on all members of a batch.
struct BatchSettings {
  std::array<Stores, 2> stores{};  // out of and in place
  Tuning tuning;
};

class BatchRunner {
 public:
  // `coordination`: rank 0's, which learns how long allreduces take; null on others.
  BatchRunner(const EngineOptions& options, const World& world,
              std::shared_ptr<GpuAccess> gpu, Waiter* waiter, Timeline* timeline,
              Coordination* coordination);

  // Runs batch `number` with the members of its process set; all of them count the
  // batches alike. `results`: where rank 0 has sent them, see inline_tensors.h. Returns
  // false if the job has failed or this rank stops waiting.
  bool Run(const Batch& batch, const std::vector<int>& members, uint64_t number,
           const BatchSettings& settings,
           const std::optional<std::string_view>& results);

  // All ranks add a process set. `number` and `settings` as of a batch of all ranks.
  bool AddProcessSet(int32_t id, const std::vector<int>& members,
                     const std::vector<int>& all, uint64_t number,
                     const BatchSettings& settings);

  // For tensors on GPUs.
  GpuRunner& gpu() { return gpu_; }
  const GpuRunner& gpu() const { return gpu_; }

  // The largest part of a tensor that goes through the exchange memory at a time.
  int64_t exchange_bytes() const { return communicator_.exchange_bytes(); }

 private:
  class Host;

  bool RunAnywhere(const Batch& batch, const std::vector<int>& members, uint64_t number,
                   const BatchSettings& settings, bool recorded);
  bool TakeResults(const Batch& batch, const std::vector<int>& members, uint64_t number,
                   std::string_view results);
  bool RunCollective(const Batch& batch, const std::vector<int>& members,
                     const BatchSettings& settings);
  bool RunAllreduce(const Batch& batch, const BatchSettings& settings);
  bool RunAdasum(const AllreduceOptions& allreduce);
  bool RunAllgather(Operation* operation);
  bool RunAlltoall(Operation* operation);
  bool RunBroadcast(const Operation& operation, const std::vector<int>& members);
  bool RunReducescatter(const Operation& operation);
  bool checks() const;
  bool CheckOutputs(const Batch& batch, const std::vector<int>& members);

  const std::shared_ptr<JobState> job_;
  const int rank_;
  // Null where no profiler shows them.
  const std::unique_ptr<const cuda::ProfilerRanges> ranges_;
  Timeline& timeline_;
  Coordination* const coordination_;
  Communicator communicator_;
  GpuRunner gpu_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_ENGINE_BATCH_RUNNER_H_
