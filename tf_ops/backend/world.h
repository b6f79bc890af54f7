// What connects a rank to the others of its job.
#pragma once

#include <functional>
#include <memory>

#include "tf_ops/backend/collective_backend.h"
#include "tf_ops/collectives/communicator.h"
#include "tf_ops/transport/channel.h"
#include "tf_ops/transport/data_link.h"
#include "tf_ops/transport/job_state.h"
#include "tf_ops/transport/link_watch.h"
#include "tf_ops/transport/segment.h"
#include "tf_ops/transport/topology.h"

namespace keras_hvd {

struct World {
  Topology topology;
  std::shared_ptr<JobState> job;
  std::shared_ptr<Channels> channels;
  // Makes the backend for tensors in host memory. `waiter` passes the time until a peer
  // is ready.
  std::function<std::unique_ptr<CollectiveBackend>(Waiter* waiter)> make_backend;
  // Null if all ranks share memory.
  std::shared_ptr<LinkWatch> link_watch;
  // Null as well.
  std::shared_ptr<CarriedBytes> carried;
};

// The world of ranks that share a segment.
World SharedMemoryWorld(std::shared_ptr<Segment> segment, int rank);

}  // namespace keras_hvd
