// Carries out the coordinator's decisions on this rank, in the order that all ranks
// follow.
//
// Decisions are read as soon as they come, also in the middle of a collective, so that
// the coordinator finds room for more; they are carried out one after the other.
#ifndef KERAS_HVD_TF_OPS_ENGINE_EXECUTION_H_
#define KERAS_HVD_TF_OPS_ENGINE_EXECUTION_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tf_ops/backend/world.h"
#include "tf_ops/collectives/communicator.h"
#include "tf_ops/collectives/store_choice.h"
#include "tf_ops/coordination/messages.h"
#include "tf_ops/engine/batch_runner.h"
#include "tf_ops/engine/engine_counters.h"
#include "tf_ops/engine/requests.h"
#include "tf_ops/engine/spin_policy.h"
#include "tf_ops/operation/operation.h"
#include "tf_ops/timeline/timeline.h"

namespace keras_hvd {

// Who wants to know what a tuning follows from: a change of settings, and batches of
// allreduces that have run. Nothing else changes with them, but for spinning.
struct TuningObserver {
  std::function<void()> tuned;
  // `bytes`: of this rank's tensors.
  std::function<void(const std::vector<TensorKey>& tensors, int64_t bytes)> ran;
};

// All of it is for who drives the engine.
class Execution {
 public:
  // `waiter` passes the time inside of collectives; `store_choice` is the
  // coordinator's, or null.
  Execution(const EngineOptions& options, const World& world,
            std::shared_ptr<GpuAccess> gpu, Waiter* waiter, Requests* requests,
            SpinPolicy* spin_policy, Timeline* timeline, StoreChoice* store_choice,
            EngineCounters* counters);

  // Whether there are decisions to read.
  bool HasNews() const { return decisions_->HasNews(); }
  // Reads what there is; returns true if there was anything.
  bool Read();

  void set_observer(TuningObserver observer) { observer_ = std::move(observer); }

  // Whether there are decisions that are read and not carried out.
  bool anything_to_do() const { return !to_do_.empty(); }
  // Carries out the next one, which may wait for peers.
  void CarryOutNext();

  // How often a batch, or a new process set, was decided for any of the ranks, so far
  // as they are carried out.
  uint64_t sequence() const { return sequence_; }
  // The title of the batch that runs; "" if none does.
  const std::string& running() const { return running_; }
  const Tuning& tuning() const { return settings_.tuning; }
  // What has been carried out of tensors on GPUs may go on there.
  GpuRunner& gpu() { return runner_.gpu(); }
  const GpuRunner& gpu() const { return runner_.gpu(); }
  int64_t window_bytes() const { return runner_.window_bytes(); }
  // Whether this is the coordinator, and there is a set that it is not in.
  bool decides_for_others() const { return decides_for_others_; }

 private:
  void CarryOut(const RunMessage& run);
  void CarryOut(const FailMessage& fail);
  void CarryOut(const AgreeMessage& agree);
  void CarryOut(const TuneMessage& tune);
  void TakePartWithZeros(const Decision::Zeros& zeros);
  bool AddProcessSet(int32_t id, const std::vector<int>& members);

  bool TakeBatch(const std::vector<TensorKey>& keys, Batch* batch);
  std::unique_ptr<Operation> Take(const TensorKey& key);
  void EndBatch(Batch batch, bool ok);
  Status OutcomeOf(const Operation& operation, bool ok) const;

  const std::shared_ptr<JobState> job_;
  const int rank_;
  Requests& requests_;
  SpinPolicy& spin_policy_;
  EngineCounters& counters_;
  BatchRunner runner_;
  const std::unique_ptr<MessageReceiver> decisions_;
  DecisionDecoder decoder_;
  std::deque<std::string> to_do_;
  // For the next batch: zeros for what this rank has joined before.
  std::unordered_map<TensorKey, std::unique_ptr<Operation>, TensorKeyHash> zeros_;
  BatchSettings settings_;
  TuningObserver observer_;  // empty: nobody
  uint64_t sequence_ = 0;
  std::string running_;
  bool decides_for_others_ = false;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_ENGINE_EXECUTION_H_
