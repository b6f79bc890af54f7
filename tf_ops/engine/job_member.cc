// See job_member.h.
#include "tf_ops/engine/job_member.h"

#include <unistd.h>

#include <utility>

#include "tf_ops/engine/process.h"
#include "tf_ops/transport/cores.h"

namespace keras_hvd {

JobMember::JobMember(const JobMemberOptions& options)
    : options_(options), rendezvous_(options.rendezvous) {
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
  std::shared_ptr<Segment> segment;
  Status status = rendezvous_.Connect(&segment);
  if (!status.ok()) return status;
  const int rank = options_.rendezvous.rank;
  world_ = SharedMemoryWorld(segment, rank);
  RankBlock& block = segment->block(rank);
  block.pid.store(getpid());
  gethostname(block.host, sizeof(block.host) - 1);
  PublishCores(&block);
  liveness_ = std::make_unique<Liveness>(segment, rank);
  status = rendezvous_.AwaitAll();
  if (!status.ok()) return status;

  EnterWorld(&block, rendezvous_.connections());
  liveness_->Watch(rendezvous_.connections());
  if (options_.engine.cores == 0) options_.engine.cores = CountCores(segment.get());
  engine_ = std::make_unique<Engine>(options_.engine, *world_);
  return Status::Ok();
}

JobMember::~JobMember() {
  engine_.reset();
  LeaveWorld();
  liveness_.reset();
}

}  // namespace keras_hvd
