#include "tf_ops/engine/job_member.h"

#include <unistd.h>

#include <utility>

#include "tf_ops/engine/process.h"
#include "tf_ops/transport/control_link.h"
#include "tf_ops/transport/cores.h"
#include "tf_ops/transport/failure_wave.h"
#include "tf_ops/transport/threads.h"

namespace keras_hvd {

namespace {

// How long other hosts may take to hear why this one does not start.
constexpr std::chrono::seconds kFarewell(1);

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
  Status status;
  try {
    status = TryToStart();
  } catch (const std::exception& error) {
    status = StatusOf(error);
  }
  if (!status.ok()) TellOthers(status);
  return status;
}

Status JobMember::TryToStart() {
  const Topology& topology = options_.topology;
  std::shared_ptr<Segment> segment;
  KHVD_RETURN_IF_ERROR(Meet(&segment));
  std::vector<int> connections = rendezvous_.connections();
  for (const Link& link : options_.links) connections.push_back(link.socket);
  if (topology.hosts() == 1) {
    world_ = SharedMemoryWorld(segment, topology.rank());
  } else {
    const auto mpi = options_.mpi ? std::make_shared<Mpi>(*options_.mpi) : nullptr;
    world_ = HostsWorld(topology, segment, options_.names, options_.links,
                        options_.host_timeout, mpi);
    if (!world_->link_watch->status().ok()) return world_->link_watch->status();
  }
  block_ = &segment->block(topology.local_index(topology.rank()));
  EnterWorld(block_, connections);
  liveness_->Watch(rendezvous_.connections());
  if (options_.engine.cores == 0) options_.engine.cores = CountCores(segment.get());
  engine_ = std::make_unique<Engine>(options_.engine, *world_);
  return Status::Ok();
}

// Brings the ranks of this host together.
Status JobMember::Meet(std::shared_ptr<Segment>* segment) {
  const Topology& topology = options_.topology;
  KHVD_RETURN_IF_ERROR(rendezvous_.Connect(segment));
  RankBlock& block = (*segment)->block(topology.local_index(topology.rank()));
  block.pid.store(getpid());
  gethostname(block.host, sizeof(block.host) - 1);
  PublishCores(&block);
  liveness_ = std::make_unique<Liveness>(*segment, topology);
  return rendezvous_.AwaitAll();
}

void JobMember::TellOthers(const Status& failure) {
  // The ranks of this host hear it from their rendezvous.
  if (!world_.has_value()) return TellOtherHosts(failure);
  // They have met this rank, and count on it.
  world_->job->Fail(Code::kRankFailed, world_->job->Describe(options_.topology.rank()) +
                                           " could not start: " + failure.message);
  world_->job->AwaitAllKnow();
}

// The ranks of other hosts may have started already, and then wait for this one.
void JobMember::TellOtherHosts(const Status& failure) {
  const Clock::time_point deadline = Clock::now() + kFarewell;
  for (const Link& link : options_.links) {
    if (link.purpose == LinkPurpose::kData) {
      CloseLink(link);
      continue;
    }
    ControlLink control(link.socket, link.peer, std::unique_ptr<TlsSession>(link.tls));
    control.Queue(
        FrameType::kFailure,
        FailureFrame({failure.code, "rank " + std::to_string(options_.topology.rank()) +
                                        " could not start: " + failure.message}));
    control.Finish(deadline);
  }
}

void JobMember::Leave(const std::string& how) {
  world_->job->SayHowItLeaves(how);
  engine_->Stop();
}

JobMember::~JobMember() {
  engine_.reset();
  LeaveWorld(block_);
  liveness_.reset();
}

}  // namespace keras_hvd
