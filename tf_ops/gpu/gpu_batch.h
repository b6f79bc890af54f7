// The resources of one batch of GPU tensors until it is enqueued: the members' host
// memory collectives, and temporary memory.
#pragma once

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

// The error for a wait that was given up: the job has failed, or this rank leaves it.
inline Status GivenUp() { return Status::RankFailed("the wait was given up"); }

// Collectives in host memory among the members of a batch.
class HostCollectives {
 public:
  virtual ~HostCollectives() = default;
  // Begins the next collective; null if the job has failed.
  virtual CollectiveBackend* Begin() = 0;
  // Runs a collective on operations in host memory.
  virtual bool Run(const Batch& batch) = 0;
  // Compares the members' outputs, which are in host memory, if this is enabled.
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
        stream(this->gpu->stream()),
        host(*host),
        staging_(*staging),
        keep_waiting_(std::move(keep_waiting)) {}

  // Gives every member all members' numbers.
  Status AllgatherValues(const std::vector<int64_t>& own,
                         std::vector<std::vector<int64_t>>* all);
  // Memory that lasts until the batch has run.
  Status TakeMemory(cuda::Memory::Space space, size_t bytes, char** memory);
  // Memory for the result of a tensor that gets `rows`, usable on the collectives'
  // stream from now on.
  Status Allocate(Operation* operation, size_t tensor,
                  const std::vector<int64_t>& rows);
  // Waits until everything on the collectives' stream has run.
  Status AwaitStream();

  std::vector<cuda::Memory> GiveMemory() { return std::move(memory_); }

  const Batch& operations;
  const std::vector<int>& members;
  const int index;
  const std::shared_ptr<cuda::Gpu> gpu;
  // The collectives' stream, or that of the caller, for which it runs.
  cuda::Stream stream;
  HostCollectives& host;
  // Null if the timeline does not record the batch.
  std::unique_ptr<GpuTimes> times;

 private:
  Staging& staging_;
  const nccl::KeepWaiting keep_waiting_;
  std::vector<cuda::Memory> memory_;
};

}  // namespace keras_hvd
