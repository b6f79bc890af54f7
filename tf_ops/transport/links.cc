#include "tf_ops/transport/links.h"

#include <memory>

#include "tf_ops/transport/connection.h"

namespace keras_hvd {
namespace {

// The hosts next to this one in the tree.
std::vector<int> Neighbors(const Topology& topology) {
  std::vector<int> hosts = topology.children();
  if (topology.parent() >= 0) hosts.push_back(topology.parent());
  return hosts;
}

void AddFailureLinks(const Topology& topology, std::vector<Link>* links) {
  if (!topology.is_leader()) {
    for (int host : Neighbors(topology)) {
      links->push_back({topology.leader_of(host), LinkPurpose::kFailure});
    }
    return;
  }
  for (int host : Neighbors(topology)) {
    for (int rank : topology.ranks_of(host)) {
      if (rank == topology.leader_of(host)) continue;
      links->push_back({rank, LinkPurpose::kFailure});
    }
  }
  for (int host = 0; host < topology.hosts(); ++host) {
    const bool turns_here = topology.substitute_parent_of(host) == topology.host();
    const bool is_turned_to = topology.substitute_parent_of(topology.host()) == host;
    if (!turns_here && !is_turned_to) continue;
    links->push_back({topology.leader_of(host), LinkPurpose::kFailure});
  }
}

}  // namespace

void CloseLink(const Link& link) {
  Connection(link.socket, std::unique_ptr<TlsSession>(link.tls));
}

std::vector<Link> LinksNeeded(const Topology& topology) {
  std::vector<Link> links;
  if (topology.is_leader()) {
    for (int host : Neighbors(topology)) {
      links.push_back({topology.leader_of(host), LinkPurpose::kControl});
    }
  }
  AddFailureLinks(topology, &links);
  // Any of them may be in a process set with this one.
  for (int peer = 0; peer < topology.size(); ++peer) {
    if (!topology.is_local(peer)) links.push_back({peer, LinkPurpose::kData});
  }
  return links;
}

}  // namespace keras_hvd
