// Carries out the coordinator's decisions on this rank, in the order common to all
// ranks.
//
// Decisions are read as soon as they come, even in the middle of a collective, so the
// coordinator finds room for more. They are carried out one after the other.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tf_ops/backend/world.h"
#include "tf_ops/collectives/communicator.h"
#include "tf_ops/coordination/messages.h"
#include "tf_ops/engine/batch_runner.h"
#include "tf_ops/engine/engine_counters.h"
#include "tf_ops/engine/requests.h"
#include "tf_ops/engine/spin_policy.h"
#include "tf_ops/operation/operation.h"
#include "tf_ops/timeline/timeline.h"

namespace keras_hvd {

// Learns of the events that tuning depends on: changes of settings, and batches of
// allreduces that have run. The settings affect nothing else, except spinning.
struct TuningObserver {
  std::function<void()> tuned;
  // `bytes`: of this rank's tensors.
  std::function<void(const std::vector<TensorKey>& tensors, int64_t bytes)> ran;
};

// Only the driving thread uses this class.
class Execution {
 public:
  // `waiter` passes the time inside collectives.
  Execution(const EngineOptions& options, const World& world,
            std::shared_ptr<GpuAccess> gpu, Waiter* waiter, Requests* requests,
            SpinPolicy* spin_policy, Timeline* timeline, EngineCounters* counters);

  // Whether there are decisions to read.
  bool HasNews() const { return decisions_->HasNews(); }
  // Reads the decisions that have come. Returns true if there were any.
  bool Read();

  void set_observer(TuningObserver observer) { observer_ = std::move(observer); }

  // Whether there are decisions that were read but not carried out.
  bool anything_to_do() const { return !to_do_.empty(); }
  // Carries out the next decision, which may wait for peers.
  void CarryOutNext();
  // On a rank that takes part in nothing any more: carries out the decisions read, up
  // to the first one that needs it. Returns false if there is one.
  bool CarryOutRest();

  // How many batches and new process sets, decided for any of the ranks, have been
  // carried out.
  uint64_t sequence() const { return sequence_; }
  // The title of the running batch; "" if there is none.
  const std::string& running() const { return running_; }
  const Tuning& tuning() const { return tuning_; }
  // Batches of GPU tensors that were carried out may still be running there.
  GpuRunner& gpu() { return runner_.gpu(); }
  const GpuRunner& gpu() const { return runner_.gpu(); }
  int64_t window_bytes() const { return runner_.window_bytes(); }
  // Whether some process set does not contain this rank, which may lead others.
  bool some_go_without() const { return some_go_without_; }
  // The error that was decided last for the leader of this host, or for one above; ""
  // if there was none, or it has taken part in a batch since.
  std::string ErrorOf(int leader) const {
    const auto found = errors_above_.find(leader);
    return found == errors_above_.end() ? "" : found->second;
  }

 private:
  bool TakeNext(std::string* message, DecisionMessage* decision);
  bool NeedsThisRank(const DecisionMessage& decision) const;
  void CarryOut(const DecisionMessage& decision);
  void CarryOut(const RunMessage& run);
  void CarryOut(const FailMessage& fail);
  void CarryOut(const AgreeMessage& agree);
  void CarryOut(const TuneMessage& tune);
  bool Run(const Batch& batch, const std::vector<int>& members, const RunMessage& run);
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
  // Zeros for the next batch, for tensors that this rank joined before.
  std::unordered_map<TensorKey, std::unique_ptr<Operation>, TensorKeyHash> zeros_;
  Tuning tuning_;
  TuningObserver observer_;  // empty: no observer
  uint64_t sequence_ = 0;
  std::string running_;
  bool some_go_without_ = false;
  std::map<int, std::string> errors_above_;  // by leader
};

}  // namespace keras_hvd
