// The world of a rank whose job is on several hosts.
#pragma once

#include <memory>
#include <vector>

#include "tf_ops/backend/world.h"
#include "tf_ops/transport/hosts_job_state.h"
#include "tf_ops/transport/links.h"
#include "tf_ops/transport/mpi.h"

namespace keras_hvd {

// `segment` is shared by the ranks of this host. `names` are those of all ranks. Takes
// over the sockets of `links`, which are those that LinksNeeded lists. `host_timeout`:
// after how long without an answer a host counts as gone. With `mpi`, which is then
// this rank's, tensors travel by it, and there are no links for them.
World HostsWorld(const Topology& topology, std::shared_ptr<Segment> segment,
                 std::vector<RankName> names, const std::vector<Link>& links,
                 std::chrono::seconds host_timeout = kHostTimeout,
                 std::shared_ptr<Mpi> mpi = nullptr);

}  // namespace keras_hvd
