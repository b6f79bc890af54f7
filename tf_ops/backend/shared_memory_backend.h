// Collectives of ranks that share memory; see collectives/.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tf_ops/backend/collective_backend.h"
#include "tf_ops/collectives/communicator.h"

namespace keras_hvd {

class SharedMemoryBackend final : public CollectiveBackend {
 public:
  SharedMemoryBackend(std::shared_ptr<Segment> segment, int rank, Waiter* waiter);

  bool Begin(const std::vector<int>& members, uint64_t number) override;
  bool BeginAgain() override;
  void End() override;

  bool Run(const Batch& batch, const Tuning& tuning) override;
  bool AllgatherValues(const std::vector<int64_t>& own,
                       std::vector<std::vector<int64_t>>* all) override;
  std::unique_ptr<JointAttempt> Attempt() override;
  bool AllgatherHashes(const std::vector<uint64_t>& own,
                       std::vector<std::vector<uint64_t>>* all) override;

  int64_t window_bytes() const override { return communicator_.window_bytes(); }
  void set_recorder(PhaseRecorder* recorder) override;

 private:
  Communicator communicator_;
  std::vector<int> members_;
};

}  // namespace keras_hvd
