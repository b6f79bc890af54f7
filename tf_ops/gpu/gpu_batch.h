// What running one batch of tensors on GPUs needs until it is enqueued: the members'
// collectives of host memory, and memory for a while.
#ifndef KERAS_HVD_TF_OPS_GPU_GPU_BATCH_H_
#define KERAS_HVD_TF_OPS_GPU_GPU_BATCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tf_ops/backend/collective_backend.h"
#include "tf_ops/gpu/gpu_times.h"
#include "tf_ops/gpu/staging.h"
#include "tf_ops/nccl/communicator.h"
#include "tf_ops/operation/operation.h"

namespace keras_hvd {

// What is said of a wait that was given up: the job has failed, or this rank leaves it.
inline Status GivenUp() { return Status::RankFailed("the wait was given up"); }

// Collectives of host memory among the members of a batch.
class HostCollectives {
 public:
  virtual ~HostCollectives() = default;
  // Begins a collective, the next one after those before; null if the job has failed.
  virtual CollectiveBackend* Begin() = 0;
  // Runs one on operations in host memory.
  virtual bool Run(const Batch& batch) = 0;
  // Compares the outputs of the members, where this is wanted; they are in host memory.
  virtual bool compares() const = 0;
  virtual bool Compare(const Batch& batch) = 0;
};

class GpuBatch {
 public:
  // `index`: this rank's index among the members.
  GpuBatch(const Batch& batch, const std::vector<int>& members, int index,
           std::shared_ptr<cuda::Gpu> gpu, HostCollectives* host, Staging* staging,
           nccl::KeepWaiting keep_waiting)
      : operations(batch),
        members(members),
        index(index),
        gpu(std::move(gpu)),
        host(*host),
        staging_(*staging),
        keep_waiting_(std::move(keep_waiting)) {}

  // Gives every member all members' numbers.
  Status AllgatherValues(const std::vector<int64_t>& own,
                         std::vector<std::vector<int64_t>>* all);
  // Memory until the batch has passed.
  Status TakeMemory(cuda::Memory::Space space, size_t bytes, char** memory);
  // Memory for the result of a tensor that gets `rows`, to be used on the collectives'
  // stream from now on.
  Status Allocate(Operation* operation, size_t tensor,
                  const std::vector<int64_t>& rows);
  // Waits until what is on the collectives' stream has passed.
  Status AwaitStream();

  std::vector<cuda::Memory> GiveMemory() { return std::move(memory_); }

  const Batch& operations;
  const std::vector<int>& members;
  const int index;
  const std::shared_ptr<cuda::Gpu> gpu;
  HostCollectives& host;
  // Null where the timeline does not record the batch.
  std::unique_ptr<GpuTimes> times;

 private:
  Staging& staging_;
  const nccl::KeepWaiting keep_waiting_;
  std::vector<cuda::Memory> memory_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_GPU_GPU_BATCH_H_
