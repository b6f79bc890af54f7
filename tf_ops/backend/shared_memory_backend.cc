// See shared_memory_backend.h.
#include "tf_ops/backend/shared_memory_backend.h"

#include "tf_ops/backend/run_batch.h"
#include "tf_ops/collectives/allgather_values.h"
#include "tf_ops/collectives/hashes.h"

namespace keras_hvd {

SharedMemoryBackend::SharedMemoryBackend(std::shared_ptr<Segment> segment, int rank,
                                         Waiter* waiter)
    : communicator_(segment, Topology::OneHost(rank, segment->size()), waiter) {}

bool SharedMemoryBackend::Begin(const std::vector<int>& members, uint64_t number) {
  members_ = members;
  return communicator_.Begin(members, number);
}

bool SharedMemoryBackend::BeginAgain() { return communicator_.BeginAgain(); }

void SharedMemoryBackend::End() { communicator_.End(); }

bool SharedMemoryBackend::AllgatherValues(const std::vector<int64_t>& own,
                                          std::vector<std::vector<int64_t>>* all) {
  return keras_hvd::AllgatherValues(own, &communicator_, all);
}

std::unique_ptr<JointAttempt> SharedMemoryBackend::Attempt() {
  return std::make_unique<CommunicatorAttempt>(&communicator_);
}

bool SharedMemoryBackend::AllgatherHashes(const std::vector<uint64_t>& own,
                                          std::vector<std::vector<uint64_t>>* all) {
  return keras_hvd::AllgatherHashes(own, &communicator_, all);
}

void SharedMemoryBackend::set_recorder(PhaseRecorder* recorder) {
  communicator_.set_recorder(recorder);
}

bool SharedMemoryBackend::Run(const Batch& batch, const Tuning& tuning) {
  return RunBatch(batch, tuning, members_, &communicator_);
}

}  // namespace keras_hvd
