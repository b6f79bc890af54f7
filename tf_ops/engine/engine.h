// The engine of one rank: takes requests, lets the coordinator order them, runs them
// and reports their end.
//
// Any thread may submit a request. A submission never waits for a peer. One thread at a
// time does all other work: it drives the engine. On the coordinator this thread also
// decides, even while it waits in a collective. A request takes this path:
//
//   Submit -> this rank's submissions -> the coordinator: CoordinatorService ->
//   decisions -> every rank
//
// `Requests` holds the requests that have not ended. `EngineLoop` determines the thread
// that works, and how it waits. `Work` does it: `CoordinatorService` (on the
// coordinator) decides, `Execution` carries out decisions, and `StallWatch` watches for
// requests that take too long.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tf_ops/backend/world.h"
#include "tf_ops/engine/engine_counters.h"
#include "tf_ops/engine/engine_loop.h"
#include "tf_ops/engine/engine_options.h"
#include "tf_ops/engine/requests.h"
#include "tf_ops/operation/description.h"
#include "tf_ops/operation/known_descriptions.h"
#include "tf_ops/operation/operation.h"
#include "tf_ops/timeline/timeline.h"

namespace keras_hvd {

// The end of a request that its caller waits for.
struct Pending {
  // Waits for it.
  Status Await();

  std::atomic<bool> ended{false};
  std::mutex mutex;
  std::condition_variable changed;
  Status status;  // guarded by mutex
};

class Engine {
 public:
  Engine(EngineOptions options, const World& world);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Does not wait for the peers. On an error, `done` is not called.
  Status Submit(std::unique_ptr<Operation> operation);
  // Like Submit, but for a small request, or one of GPU tensors, the calling thread
  // drives while the peers are expected at any moment. It may call `done` itself.
  Status SubmitAndDrive(std::unique_ptr<Operation> operation);
  // Like Submit, but waits for the end and returns its status; `done` is not called.
  Status Run(std::unique_ptr<Operation> operation);
  // Like Submit, but `pending` tells the end; `done` is not called.
  Status Begin(std::unique_ptr<Operation> operation, Pending* pending);
  // The calling thread waits for a submitted request, whose `done` sets `ended`. It
  // drives until then, or until nothing is expected soon.
  void DriveUntil(const std::atomic<bool>& ended);

  // Gives an operation with GPU tensors its current point on the caller's stream. Call
  // this before Submit or Run. `end`: see khvd_request.
  Status SetStreamPoint(cuda::Stream stream, void** end, Operation* operation);

  // Make all ranks agree on something, and wait for it. `ranks` is ascending. `*id` is
  // the new set's number, from 1; `*last` is the rank that joined last. Until all ranks
  // have joined, a joined rank contributes zeros to allreduces of all ranks.
  Status AddProcessSet(const std::vector<int>& ranks, int32_t* id);
  Status RemoveProcessSet(int32_t id);
  Status Join(int32_t* last);
  // The ranks of a set that this rank knows.
  Status MembersOf(int32_t process_set, std::vector<int>* ranks);

  // Leaves the job. A running batch is finished; waiting requests end with kShutDown.
  void Stop();

  // Record the coordinator's view; see timeline.h. On other ranks both do nothing.
  Status StartTimeline(const std::string& path, bool mark_cycles);
  void StopTimeline();
  // See recording.h. It ends with the engine.
  Status StartRecording(const std::string& path);

  const EngineCounters& counters() const { return counters_; }
  KnownDescriptions& known_descriptions() { return known_descriptions_; }

 private:
  Status Agree(Description description, int32_t* answer);

  const bool is_coordinator_;
  const int size_;
  EngineCounters counters_;
  Timeline timeline_;
  const std::shared_ptr<GpuAccess> gpu_;
  KnownDescriptions known_descriptions_;
  Requests requests_;
  EngineLoop loop_;  // last: its thread uses the other members
};

}  // namespace keras_hvd
