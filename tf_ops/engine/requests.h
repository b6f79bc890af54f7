// The requests of this rank, from their submission on any thread to their end, which
// the driving thread reports.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "tf_ops/backend/world.h"
#include "tf_ops/coordination/coordinator.h"
#include "tf_ops/coordination/messages.h"
#include "tf_ops/engine/engine_counters.h"
#include "tf_ops/engine/engine_options.h"
#include "tf_ops/operation/operation.h"
#include "tf_ops/operation/operation_log.h"
#include "tf_ops/operation/process_sets.h"

namespace keras_hvd {

class Requests {
 public:
  Requests(const World& world, const EngineOptions& options, EngineCounters* counters);

  // On any thread.

  // Takes a request and tells the coordinator, but rings nobody. On an error, the
  // request's `done` is not called.
  Status Submit(std::unique_ptr<Operation> operation);
  // Whether any (or several) requests have not begun to run.
  bool any_pending() const { return pending_count_.load() > 0; }
  bool several_pending() const { return pending_count_.load() > 1; }
  // The ranks of a process set that this rank knows.
  Status MembersOf(int32_t process_set, std::vector<int>* ranks);

  // The rest is for the driving thread.

  // Sends the submissions that found no room earlier. Returns true if any has gone out.
  bool Flush() { return CanFlush() && FlushSubmissions(); }
  bool CanFlush() const { return submissions_->CanFlush(); }

  // The oldest request of the name, which is then no longer pending; null if none.
  std::unique_ptr<Operation> Take(const TensorKey& key);
  // When the oldest pending request was submitted; the end of time if none is pending.
  Clock::time_point OldestPending();
  // Notes a request that this rank only takes part in because it has joined.
  void NoteJoined(Operation* operation);
  void NoteRunning(const Batch& batch);
  // Reports the end of a request that was taken.
  void End(std::unique_ptr<Operation> operation, const Status& status);
  // Ends all pending requests, and answers all later ones, with `reason`.
  void EndAll(Code code, const std::string& reason);

  void AddProcessSet(int32_t id, std::vector<int> members);
  void RemoveProcessSet(int32_t id);
  // Only the driving thread changes them, so it reads them without the lock.
  const ProcessSets& process_sets() const { return process_sets_; }

 private:
  using SameName = std::deque<std::unique_ptr<Operation>>;

  Status Check(const Description& description) const;
  bool FlushSubmissions();

  const std::shared_ptr<JobState> job_;
  const int rank_;
  const int64_t most_inline_bytes_;
  EngineCounters& counters_;

  std::mutex mutex_;  // guards all members below
  ProcessSets process_sets_;
  std::unordered_map<TensorKey, SameName, TensorKeyHash> pending_;
  std::atomic<int64_t> pending_count_{0};
  SubmissionEncoder encoder_;
  const std::unique_ptr<MessageSender> submissions_;
  OperationLog log_;
  Status refusal_;  // the answer once no more requests are taken
};

}  // namespace keras_hvd
