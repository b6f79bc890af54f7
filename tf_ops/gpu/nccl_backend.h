// Collectives of GPU tensors by NCCL.
#pragma once

#include <memory>
#include <vector>

#include "tf_ops/gpu/gpu_backend.h"
#include "tf_ops/nccl/communicator.h"
#include "tf_ops/nccl/reduction.h"

namespace keras_hvd {

class NcclBackend final : public GpuBackend {
 public:
  // `capabilities`: those that all members have. `members`: their number.
  NcclBackend(std::unique_ptr<nccl::Communicator> communicator, int members,
              const nccl::Capabilities& capabilities);

  bool CanRun(const Operation& operation) const override;
  Status Run(const std::vector<Operation*>& operations, GpuBatch* batch) override;

  nccl::Communicator& communicator() { return *communicator_; }
  const nccl::Capabilities& capabilities() const { return capabilities_; }

 private:
  const std::unique_ptr<nccl::Communicator> communicator_;
  const int members_;
  const nccl::Capabilities capabilities_;
};

}  // namespace keras_hvd
