#include "tf_ops/backend/world.h"

#include <utility>

#include "tf_ops/backend/hosts_backend.h"
#include "tf_ops/transport/hosts_channels.h"
#include "tf_ops/transport/mpi_data_link.h"
#include "tf_ops/transport/shared_memory_channel.h"
#include "tf_ops/transport/socket_data_link.h"

namespace keras_hvd {
namespace {

void AddConnection(const Link& link, std::chrono::seconds host_timeout,
                   const std::shared_ptr<CarriedBytes>& carried,
                   std::shared_ptr<SocketDataLink>* all) {
  std::unique_ptr<TlsSession> tls(link.tls);
  if (*all != nullptr) return (*all)->Add(link.socket, std::move(tls));
  *all = std::make_shared<SocketDataLink>(link.socket, std::move(tls), host_timeout);
  (*all)->set_carried({carried, &carried->tcp});
}

DataLinks LinksOver(std::shared_ptr<Mpi> mpi, const Topology& topology,
                    const std::shared_ptr<CarriedBytes>& carried) {
  DataLinks links(topology.size());
  for (int peer = 0; peer < topology.size(); ++peer) {
    if (topology.is_local(peer)) continue;
    links[peer] = std::make_shared<MpiDataLink>(mpi, peer);
    links[peer]->set_carried({carried, &carried->mpi});
  }
  return links;
}

}  // namespace

World SharedMemoryWorld(std::shared_ptr<Segment> segment, int rank) {
  const Topology topology = Topology::OneHost(rank, segment->size());
  const auto job = std::make_shared<JobState>(segment, rank);
  return {topology,
          job,
          std::make_shared<SharedMemoryChannels>(segment, rank),
          [topology, segment, job](Waiter* waiter) {
            return std::make_unique<HostsBackend>(topology, segment, job, DataLinks(),
                                                  waiter);
          },
          nullptr,
          nullptr};
}

World HostsWorld(const Topology& topology, std::shared_ptr<Segment> segment,
                 std::vector<RankName> names, const std::vector<Link>& links,
                 std::chrono::seconds host_timeout, std::shared_ptr<Mpi> mpi) {
  std::vector<std::unique_ptr<ControlLink>> control, failure;
  const auto carried = std::make_shared<CarriedBytes>();
  std::vector<std::shared_ptr<SocketDataLink>> connected(topology.size());
  std::vector<int> sockets, quiet_sockets;
  for (const Link& link : links) {
    const bool is_quiet = link.purpose == LinkPurpose::kFailure;
    (is_quiet ? quiet_sockets : sockets).push_back(link.socket);
    if (link.purpose == LinkPurpose::kData) {
      AddConnection(link, host_timeout, carried, &connected[link.peer]);
      continue;
    }
    (is_quiet ? failure : control)
        .push_back(std::make_unique<ControlLink>(
            link.socket, link.peer, std::unique_ptr<TlsSession>(link.tls)));
  }
  const DataLinks data = mpi == nullptr ? DataLinks(connected.begin(), connected.end())
                                        : LinksOver(std::move(mpi), topology, carried);
  const auto job = std::make_shared<HostsJobState>(segment, topology, std::move(names),
                                                   std::move(control),
                                                   std::move(failure), host_timeout);
  const int index = topology.local_index(topology.rank());
  return {topology,
          job,
          std::make_shared<HostsChannels>(segment, index, job),
          [topology, segment, job, data](Waiter* waiter) {
            return std::make_unique<HostsBackend>(topology, segment, job, data, waiter);
          },
          std::make_shared<LinkWatch>(sockets, quiet_sockets, &job->bell(),
                                      [job] { job->NoteFailureNews(); }),
          carried};
}

}  // namespace keras_hvd
