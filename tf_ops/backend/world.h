// A rank's view of its job: the job's state, channels, and a backend.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tf_ops/backend/collective_backend.h"
#include "tf_ops/collectives/communicator.h"
#include "tf_ops/transport/channel.h"
#include "tf_ops/transport/data_link.h"
#include "tf_ops/transport/hosts_job_state.h"
#include "tf_ops/transport/link_watch.h"
#include "tf_ops/transport/links.h"
#include "tf_ops/transport/mpi.h"
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
  // Null if all ranks share memory, too.
  std::shared_ptr<CarriedBytes> carried;
};

// The world of ranks that share a segment.
World SharedMemoryWorld(std::shared_ptr<Segment> segment, int rank);
// The world of a rank whose job is on several hosts.
//
// `segment` is shared by the ranks of this host. `names` are those of all ranks. Takes
// over the sockets of `links`, which are those that LinksNeeded lists. `host_timeout`:
// a host without an answer for this long counts as gone. With `mpi`, which is then this
// rank's, tensors travel by it, and there are no links for them.
World HostsWorld(const Topology& topology, std::shared_ptr<Segment> segment,
                 std::vector<RankName> names, const std::vector<Link>& links,
                 std::chrono::seconds host_timeout = kHostTimeout,
                 std::shared_ptr<Mpi> mpi = nullptr);

}  // namespace keras_hvd
