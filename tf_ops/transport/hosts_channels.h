// The channels of a job on several hosts: shared memory within a host, the tree of
// leaders between hosts.
#pragma once

#include <memory>
#include <vector>

#include "tf_ops/transport/hosts_job_state.h"
#include "tf_ops/transport/shared_memory_channel.h"

namespace keras_hvd {

class HostsChannels final : public SharedMemoryChannels {
 public:
  // `index`: this rank's among those of its host.
  HostsChannels(std::shared_ptr<Segment> segment, int index,
                std::shared_ptr<HostsJobState> job)
      : SharedMemoryChannels(std::move(segment), index), job_(std::move(job)) {}

  std::vector<std::unique_ptr<MessageReceiver>> FromBelow() override;
  std::unique_ptr<MessageSender> ToBelow() override;
  std::unique_ptr<MessageSender> ToAbove() override;
  std::unique_ptr<MessageReceiver> FromAbove() override;

 private:
  using Neighbor = HostsJobState::Neighbor;

  std::vector<Neighbor*> Neighbors(bool above);

  const std::shared_ptr<HostsJobState> job_;
};

}  // namespace keras_hvd
