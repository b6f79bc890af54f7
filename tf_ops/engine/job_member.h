// This process as a rank of a job: entering and leaving it. A member makes the world,
// which ends with it. process.h has the parts that last as long as the process.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tf_ops/backend/world.h"
#include "tf_ops/engine/engine.h"
#include "tf_ops/transport/liveness.h"
#include "tf_ops/transport/rendezvous.h"

namespace keras_hvd {

struct JobMemberOptions {
  Topology topology = Topology::OneHost(0, 1);
  std::string job;
  // If there are other hosts: of all ranks, and to those on other hosts.
  std::vector<RankName> names;
  std::vector<Link> links;
  std::chrono::seconds host_timeout = kHostTimeout;
  std::optional<MpiOptions> mpi;  // carries tensors, instead of links
  RendezvousOptions rendezvous;   // Enter fills in all but the limits and `cancel_fd`
  EngineOptions engine;           // Enter fills in `local_rank`, and `cores` if it is 0
  int local_rank = 0, local_size = 1;
  int cross_rank = 0, cross_size = 1;
};

class JobMember {
 public:
  // Returns when all ranks of this host have entered.
  static Status Enter(const JobMemberOptions& options,
                      std::shared_ptr<JobMember>* member);
  ~JobMember();
  JobMember(const JobMember&) = delete;
  JobMember& operator=(const JobMember&) = delete;

  const JobMemberOptions& options() const { return options_; }
  Engine& engine() { return *engine_; }
  std::shared_ptr<CarriedBytes> carried() const { return world_->carried; }
  Status failure() const { return world_->job->Failure(); }
  // Leaves the job. `how`: the words for ranks that still need this one; "": the usual.
  void Leave(const std::string& how);

 private:
  explicit JobMember(const JobMemberOptions& options);
  Status Start();
  Status TryToStart();
  Status Meet(std::shared_ptr<Segment>* segment);
  void TellOthers(const Status& failure);
  void TellOtherHosts(const Status& failure);

  JobMemberOptions options_;
  RankBlock* block_ = nullptr;  // this rank's; null: it has not entered
  // In order of creation; destroyed in reverse order.
  Rendezvous rendezvous_;
  std::optional<World> world_;
  std::unique_ptr<Liveness> liveness_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace keras_hvd
