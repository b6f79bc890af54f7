#include "tf_ops/backend/hosts_backend.h"

#include <utility>

#include "tf_ops/backend/run_batch.h"
#include "tf_ops/collectives/allgather_values.h"
#include "tf_ops/collectives/hashes.h"

namespace keras_hvd {

HostsBackend::HostsBackend(const Topology& topology, std::shared_ptr<Segment> segment,
                           std::shared_ptr<JobState> job, DataLinks links,
                           Waiter* waiter)
    : hosts_(topology, std::move(segment), std::move(job), std::move(links), waiter) {}

bool HostsBackend::Begin(const std::vector<int>& members, uint64_t number) {
  members_ = members;
  return hosts_.Begin(members, number);
}

bool HostsBackend::Run(const Batch& batch, const Tuning& tuning) {
  return is_local() ? RunBatch(batch, tuning, members_, &hosts_.local())
                    : RunBatch(batch, tuning, members_, &hosts_);
}

bool HostsBackend::AllgatherValues(const std::vector<int64_t>& own,
                                   std::vector<std::vector<int64_t>>* all) {
  return is_local() ? keras_hvd::AllgatherValues(own, &hosts_.local(), all)
                    : keras_hvd::AllgatherValues(own, &hosts_, all);
}

std::unique_ptr<JointAttempt> HostsBackend::Attempt() {
  return std::make_unique<JointAttempt>(&hosts_);
}

bool HostsBackend::AllgatherHashes(const std::vector<uint64_t>& own,
                                   std::vector<std::vector<uint64_t>>* all) {
  return is_local() ? keras_hvd::AllgatherHashes(own, &hosts_.local(), all)
                    : keras_hvd::AllgatherHashes(own, &hosts_, all);
}

int64_t HostsBackend::window_bytes() const { return hosts_.local().window_bytes(); }

void HostsBackend::set_recorder(PhaseRecorder* recorder) {
  hosts_.local().set_recorder(recorder);
}

}  // namespace keras_hvd
