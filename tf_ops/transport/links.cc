// See links.h.
#include "tf_ops/transport/links.h"

namespace keras_hvd {

std::vector<Link> LinksNeeded(const Topology& topology) {
  std::vector<Link> links;
  if (topology.is_leader()) {
    const int parent = topology.parent();
    if (parent >= 0) {
      links.push_back({topology.leader_of(parent), LinkPurpose::kControl});
    }
    for (int child : topology.children()) {
      links.push_back({topology.leader_of(child), LinkPurpose::kControl});
    }
  }
  // Any of them may be in a process set with this one.
  for (int peer = 0; peer < topology.size(); ++peer) {
    if (!topology.is_local(peer)) links.push_back({peer, LinkPurpose::kData});
  }
  return links;
}

}  // namespace keras_hvd
