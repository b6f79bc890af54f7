// The engine of one rank: takes requests, has them ordered, runs them, reports their
// end.
//
// One thread at a time does all of it but the submission, which any thread may call and
// which never waits for a peer: it drives the engine. Who drives the coordinator's
// engine decides as well, also while it waits in a collective. A request travels so:
//
//   Submit -> this rank's submissions -> the coordinator: CoordinatorService ->
//   decisions -> every rank
//
// Its parts: `Requests` are what was submitted and has not ended; `EngineLoop` is who
// does the work, and how it waits; `Work` is what there is to do, of which
// `CoordinatorService` (the coordinator's) decides, `Execution` carries out what was
// decided, and `StallWatch` looks after what takes too long.
#ifndef KERAS_HVD_TF_OPS_ENGINE_ENGINE_H_
#define KERAS_HVD_TF_OPS_ENGINE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tf_ops/backend/world.h"
#include "tf_ops/engine/engine_counters.h"
#include "tf_ops/engine/engine_loop.h"
#include "tf_ops/engine/engine_options.h"
#include "tf_ops/engine/requests.h"
#include "tf_ops/operation/description.h"
#include "tf_ops/operation/operation.h"
#include "tf_ops/timeline/timeline.h"

namespace keras_hvd {

class Engine {
 public:
  Engine(EngineOptions options, const World& world);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Does not wait for the peers. On an error `done` is not called.
  Status Submit(std::unique_ptr<Operation> operation);
  // The same, but for a small request the calling thread drives while the peers are
  // expected at any moment; it may then call `done` itself.
  Status SubmitAndDrive(std::unique_ptr<Operation> operation);
  // The same, and waits for the end, which it returns; `done` is not called.
  Status Run(std::unique_ptr<Operation> operation);

  // Gives an operation whose tensors are on a GPU its point on the caller's stream,
  // now; it is then submitted by Submit or Run. `end`: see khvd_request.
  Status SetStreamPoint(cuda::Stream stream, void** end, Operation* operation);

  // Have all ranks agree on something, and wait for it. `ranks` ascending; `*id` is the
  // new set's number, from 1, and `*last` the rank that joined last. Until all have
  // joined, a rank that has takes part in allreduces of all ranks, with zeros.
  Status AddProcessSet(const std::vector<int>& ranks, int32_t* id);
  Status RemoveProcessSet(int32_t id);
  Status Join(int32_t* last);
  // The ranks of a set that this rank knows.
  Status MembersOf(int32_t process_set, std::vector<int>* ranks);

  // Leaves the job. What is running is finished, what is waiting ends with kShutDown.
  void Stop();

  // Of what the coordinator knows; see timeline.h. On other ranks both do nothing.
  Status StartTimeline(const std::string& path, bool mark_cycles);
  void StopTimeline();

  const EngineCounters& counters() const { return counters_; }

 private:
  Status Agree(Description description, int32_t* answer);

  const bool is_coordinator_;
  const int size_;
  EngineCounters counters_;
  Timeline timeline_;
  const std::shared_ptr<GpuAccess> gpu_;
  Requests requests_;
  EngineLoop loop_;  // the last one: its thread uses the others
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_ENGINE_ENGINE_H_
