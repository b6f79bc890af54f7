// See hosts_world.h.
#include "tf_ops/backend/hosts_world.h"

#include <utility>

#include "tf_ops/backend/hosts_backend.h"
#include "tf_ops/transport/hosts_channels.h"

namespace keras_hvd {

World HostsWorld(const Topology& topology, std::shared_ptr<Segment> segment,
                 std::vector<RankName> names, const std::vector<Link>& links,
                 std::chrono::seconds host_timeout) {
  std::vector<std::unique_ptr<ControlLink>> control, failure;
  DataLinks data(topology.size());
  std::vector<int> sockets, quiet_sockets;
  for (const Link& link : links) {
    const bool is_quiet = link.purpose == LinkPurpose::kFailure;
    (is_quiet ? quiet_sockets : sockets).push_back(link.socket);
    std::unique_ptr<TlsSession> tls(link.tls);
    if (link.purpose == LinkPurpose::kData) {
      std::shared_ptr<DataLink>& all = data[link.peer];
      if (all == nullptr) {
        all = std::make_shared<DataLink>(link.socket, std::move(tls), host_timeout);
      } else {
        all->Add(link.socket, std::move(tls));
      }
    } else {
      (is_quiet ? failure : control)
          .push_back(
              std::make_unique<ControlLink>(link.socket, link.peer, std::move(tls)));
    }
  }
  const auto job = std::make_shared<HostsJobState>(segment, topology, std::move(names),
                                                   std::move(control),
                                                   std::move(failure), host_timeout);
  const int index = topology.local_index(topology.rank());
  return {topology, job, std::make_shared<HostsChannels>(segment, index, job),
          [topology, segment, job, data](Waiter* waiter, StoreChoice* store_choice) {
            return std::make_unique<HostsBackend>(topology, segment, job, data, waiter,
                                                  store_choice);
          },
          std::make_shared<LinkWatch>(sockets, quiet_sockets, &job->bell(),
                                      [job] { job->NoteFailureNews(); })};
}

}  // namespace keras_hvd
