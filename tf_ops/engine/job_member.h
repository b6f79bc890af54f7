// This process as a rank of a job: entering it, and leaving it. What it makes is the
// world, which ends with it; what lasts for the process is in process.h.
#ifndef KERAS_HVD_TF_OPS_ENGINE_JOB_MEMBER_H_
#define KERAS_HVD_TF_OPS_ENGINE_JOB_MEMBER_H_

#include <memory>
#include <optional>

#include "tf_ops/backend/world.h"
#include "tf_ops/engine/engine.h"
#include "tf_ops/transport/liveness.h"
#include "tf_ops/transport/rendezvous.h"

namespace keras_hvd {

struct JobMemberOptions {
  RendezvousOptions rendezvous;
  EngineOptions engine;  // `rank` and, where it is 0, `cores` are filled in
  int local_rank = 0, local_size = 1;
  int cross_rank = 0, cross_size = 1;
};

class JobMember {
 public:
  // Returns when all ranks have entered.
  static Status Enter(const JobMemberOptions& options,
                      std::shared_ptr<JobMember>* member);
  ~JobMember();
  JobMember(const JobMember&) = delete;
  JobMember& operator=(const JobMember&) = delete;

  const JobMemberOptions& options() const { return options_; }
  Engine& engine() { return *engine_; }
  Status failure() const { return world_->job->Failure(); }

 private:
  explicit JobMember(const JobMemberOptions& options);
  Status Start();

  JobMemberOptions options_;
  // In the order in which they come to be; they end in the opposite one.
  Rendezvous rendezvous_;
  std::optional<World> world_;
  std::unique_ptr<Liveness> liveness_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_ENGINE_JOB_MEMBER_H_
