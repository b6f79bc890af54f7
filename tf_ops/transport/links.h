// The connections that a rank has to ranks on other hosts. The launching side makes
// them, and has proven who is at the other end, before an engine gets them.
#pragma once

#include <vector>

#include "tf_ops/transport/tls.h"
#include "tf_ops/transport/topology.h"

namespace keras_hvd {

// The values are those of khvd_link_purpose.
enum class LinkPurpose {
  kControl = 0,  // between the leaders of hosts next to each other in the tree
  kData = 1,     // for tensors
  kFailure =
      2,  // for when the job fails: of ranks that do not lead, to the leaders next
          // to their host in the tree; of leaders, to their substitute parents
};

// The receiver of one has to pass on or close its socket and its session.
struct Link {
  int peer;
  LinkPurpose purpose;
  int socket = -1;
  TlsSession* tls = nullptr;  // complete, over the socket; null: in the clear
};

void CloseLink(const Link& link);

// The links that a rank needs. Their other ends are links that the peers need.
std::vector<Link> LinksNeeded(const Topology& topology);

}  // namespace keras_hvd
