// See job_member.h.
#include "tf_ops/engine/job_member.h"

#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "tf_ops/engine/process.h"
#include "tf_ops/transport/cores.h"

namespace keras_hvd {

namespace {

// Ranks of other hosts may be on the same machine.
std::string NameOnHost(const JobMemberOptions& options) {
  const Topology& topology = options.topology;
  if (topology.hosts() == 1) return options.job;
  return options.job + "#" + std::to_string(topology.host());
}

RendezvousOptions RendezvousOn(const JobMemberOptions& options) {
  const Topology& topology = options.topology;
  RendezvousOptions rendezvous = options.rendezvous;
  rendezvous.rank = topology.local_index(topology.rank());
  rendezvous.size = topology.local_size();
  rendezvous.names = topology.local_ranks();
  rendezvous.job = NameOnHost(options);
  return rendezvous;
}

}  // namespace

JobMember::JobMember(const JobMemberOptions& options)
    : options_(options), rendezvous_(RendezvousOn(options)) {
  options_.engine.local_rank = options.local_rank;
}

Status JobMember::Enter(const JobMemberOptions& options,
                        std::shared_ptr<JobMember>* member) {
  std::shared_ptr<JobMember> entering(new JobMember(options));
  Status status = entering->Start();
  if (status.ok()) *member = std::move(entering);
  return status;
}

Status JobMember::Start() {
  const Topology& topology = options_.topology;
  std::shared_ptr<Segment> segment;
  Status status = rendezvous_.Connect(&segment);
  if (!status.ok()) {
    CloseLinks();
    return status;
  }
  std::vector<int> connections = rendezvous_.connections();
  for (const Link& link : options_.links) connections.push_back(link.socket);
  if (topology.hosts() == 1) {
    world_ = SharedMemoryWorld(segment, topology.rank());
  } else {
    world_ = HostsWorld(topology, segment, options_.names, options_.links,
                        options_.host_timeout);
    if (!world_->link_watch->status().ok()) return world_->link_watch->status();
  }
  RankBlock& block = segment->block(topology.local_index(topology.rank()));
  block.pid.store(getpid());
  gethostname(block.host, sizeof(block.host) - 1);
  PublishCores(&block);
  liveness_ = std::make_unique<Liveness>(segment, topology);
  status = rendezvous_.AwaitAll();
  if (!status.ok()) return status;

  EnterWorld(&block, connections);
  liveness_->Watch(rendezvous_.connections());
  if (options_.engine.cores == 0) options_.engine.cores = CountCores(segment.get());
  engine_ = std::make_unique<Engine>(options_.engine, *world_);
  return Status::Ok();
}

void JobMember::CloseLinks() {
  for (const Link& link : options_.links) CloseLink(link);
}

JobMember::~JobMember() {
  engine_.reset();
  LeaveWorld();
  liveness_.reset();
}

}  // namespace keras_hvd
