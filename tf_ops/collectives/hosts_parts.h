// How parts of tensors travel among members on several hosts; see parts.h.
#pragma once

#include <vector>

#include "tf_ops/collectives/hosts_communicator.h"
#include "tf_ops/collectives/parts.h"

namespace keras_hvd {

// As in parts.h. Every part travels from its tensor straight to its member.
bool Scatter(const Parts& parts, const std::vector<const void*>& tensors,
             HostsCommunicator* hosts, const VisitStretch& visit);

// As in parts.h. A part travels to each host once, and there through shared memory.
bool Gather(const Parts& parts, const std::vector<const void*>& own,
            HostsCommunicator* hosts, const std::vector<void*>& tensors);

}  // namespace keras_hvd
