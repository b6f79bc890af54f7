// This process as a rank of a job: joining, leaving, crashing, forking.
#ifndef KERAS_HVD_TF_OPS_ENGINE_PROCESS_H_
#define KERAS_HVD_TF_OPS_ENGINE_PROCESS_H_

#include <memory>
#include <string>

#include "tf_ops/backend/world.h"
#include "tf_ops/engine/engine.h"
#include "tf_ops/transport/liveness.h"
#include "tf_ops/transport/rendezvous.h"

namespace keras_hvd {

struct ProcessOptions {
  RendezvousOptions rendezvous;
  EngineOptions engine;  // `rank` and, where it is 0, `cores` are filled in
  int local_rank = 0, local_size = 1;
  int cross_rank = 0, cross_size = 1;
};

class Process {
 public:
  // Returns when all ranks have joined.
  static Status Join(const ProcessOptions& options, std::shared_ptr<Process>* process);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  const ProcessOptions& options() const { return options_; }
  Engine& engine() { return *engine_; }
  Status failure() const { return world_.job->Failure(); }

 private:
  explicit Process(const ProcessOptions& options);
  Status Start();

  ProcessOptions options_;
  // In the order in which they come to be; they end in the opposite one.
  Rendezvous rendezvous_;
  World world_;
  std::unique_ptr<Liveness> liveness_;
  std::unique_ptr<Engine> engine_;
};

// Whether this process was forked from one that is or was a rank; it cannot be one.
bool IsForked();

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_ENGINE_PROCESS_H_
