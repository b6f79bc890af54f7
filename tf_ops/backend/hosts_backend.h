// Collectives in host memory: shared memory within a host, connections between hosts;
// see collectives/hosts_communicator.h.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tf_ops/backend/collective_backend.h"
#include "tf_ops/collectives/hosts_communicator.h"

namespace keras_hvd {

class HostsBackend final : public CollectiveBackend {
 public:
  // `segment` is this host's. `links` has one to each rank on another host; none are
  // needed if there is no other host.
  HostsBackend(const Topology& topology, std::shared_ptr<Segment> segment,
               std::shared_ptr<JobState> job, DataLinks links, Waiter* waiter);

  bool Begin(const std::vector<int>& members, uint64_t number) override;
  bool BeginAgain() override { return hosts_.BeginAgain(); }
  void End() override { hosts_.End(); }

  bool Run(const Batch& batch, const Tuning& tuning) override;
  bool AllgatherValues(const std::vector<int64_t>& own,
                       std::vector<std::vector<int64_t>>* all) override;
  std::unique_ptr<JointAttempt> Attempt() override;
  bool AllgatherHashes(const std::vector<uint64_t>& own,
                       std::vector<std::vector<uint64_t>>* all) override;

  int64_t window_bytes() const override;
  void set_recorder(PhaseRecorder* recorder) override;

 private:
  bool is_local() const { return hosts_.hosts() == 1; }

  HostsCommunicator hosts_;
  std::vector<int> members_;
};

}  // namespace keras_hvd
