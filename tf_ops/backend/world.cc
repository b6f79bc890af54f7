// See world.h.
#include "tf_ops/backend/world.h"

#include "tf_ops/backend/shared_memory_backend.h"
#include "tf_ops/transport/shared_job_state.h"
#include "tf_ops/transport/shared_memory_channel.h"

namespace keras_hvd {

World SharedMemoryWorld(std::shared_ptr<Segment> segment, int rank) {
  return {Topology::OneHost(rank, segment->size()),
          std::make_shared<SharedJobState>(segment, rank),
          std::make_shared<SharedMemoryChannels>(segment, rank),
          [segment, rank](Waiter* waiter) {
            return std::make_unique<SharedMemoryBackend>(segment, rank, waiter);
          },
          nullptr,
          nullptr};
}

}  // namespace keras_hvd
