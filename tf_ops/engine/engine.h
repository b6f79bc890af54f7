// The engine of one rank: takes requests, has them ordered, runs them, reports their
// end.
//
// One thread at a time does all of it but the submission, which any thread may call and
// which never waits for a peer: it drives the engine. That is the engine's own thread,
// or a caller of Run or SubmitAndDrive, which would only wait otherwise and so saves
// two changes of thread. Who drives on rank 0 is the coordinator as well, also while it
// waits in a collective. A request travels so:
//
//   Submit -> this rank's submissions -> rank 0: Coordination -> decisions -> every
//   rank
#ifndef KERAS_HVD_TF_OPS_ENGINE_ENGINE_H_
#define KERAS_HVD_TF_OPS_ENGINE_ENGINE_H_

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tf_ops/collectives/allreduce.h"
#include "tf_ops/collectives/communicator.h"
#include "tf_ops/collectives/store_choice.h"
#include "tf_ops/engine/autotune.h"
#include "tf_ops/engine/coordination.h"
#include "tf_ops/engine/description.h"
#include "tf_ops/engine/operation_log.h"
#include "tf_ops/engine/timeline.h"
#include "tf_ops/transport/segment.h"

namespace keras_hvd {

struct EngineOptions {
  int rank = 0;
  int64_t fusion_bytes = 64 << 20;
  double stall_warning_seconds = 60;  // negative: never
  double stall_abort_seconds = 0;     // 0: never
  int cores = 1;                      // that all ranks of this host share
  bool check = false;                 // compare all outputs; rank 0's word counts
  size_t cache_capacity = 16384;      // names that travel as numbers
  AutotuneOptions autotune;           // rank 0's count
};

// The end of a request whose caller drives for a while, and of which one of the two,
// caller or engine, calls `done`: whoever comes second.
struct Ending {
  std::atomic<bool> claimed{false};
  std::atomic<bool> ended{false};
  Status status;
};

// A request under way. The buffers stay the engine's until `done` has been called.
struct Operation {
  struct Buffer {
    const void* input;
    void* output;
  };
  std::shared_ptr<const Description> description;
  uint64_t submitter = 0;
  std::vector<Buffer> buffers;
  std::vector<int64_t> rows;    // this rank's first dimensions, where they may differ
  std::vector<int64_t> splits;  // alltoall: how many rows go to each member
  // Where first dimensions may differ: memory for a tensor's result, or null.
  std::function<void*(size_t tensor, const std::vector<int64_t>& rows)> allocate;
  std::function<void(const Status&)> done;

  int32_t* answer = nullptr;  // of an agreement: set before `done` is called

  // The engine's own notes.
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> zeros;         // what a rank that has joined takes part with
  std::shared_ptr<Ending> ending;  // where a caller may see to `done` itself
  uint64_t log_number = 0;
  Clock::time_point submitted;
  bool out_of_memory = false;
  std::vector<int64_t> allocated_bytes;  // of the results
};

struct EngineCounters {
  std::atomic<int64_t> batches{0};
  std::atomic<int64_t> tensors{0};
  std::atomic<int64_t> bytes{0};
  std::atomic<int64_t> sleeps{0};
  std::atomic<int64_t> lost_wakes{0};
  std::atomic<int64_t> tunings{0};  // settings that have held
};

class Engine : private Waiter {
 public:
  Engine(EngineOptions options, std::shared_ptr<Segment> segment);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Does not wait for the peers. On an error `done` is not called.
  Status Submit(std::unique_ptr<Operation> operation);
  // The same, but for a small request the calling thread drives while the peers are
  // expected at any moment; it may then call `done` itself.
  Status SubmitAndDrive(std::unique_ptr<Operation> operation);
  // The same, and waits for the end, which it returns; `done` is not called.
  Status Run(std::unique_ptr<Operation> operation);

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

  // Of what rank 0 knows; see timeline.h. On other ranks both do nothing.
  Status StartTimeline(const std::string& path, bool mark_cycles);
  void StopTimeline();

  const EngineCounters& counters() const { return counters_; }

 private:
  using Operations = std::deque<std::unique_ptr<Operation>>;
  using Ready = std::function<bool()>;

  void Loop();
  void DriveOrRing(std::unique_lock<std::mutex>* driving,
                   const std::atomic<bool>& ended);
  void Drive(const std::atomic<bool>& ended);
  void LeaveDriving();
  void GiveWay(std::unique_lock<std::mutex>* driving);
  bool Progress();
  bool RunNext();
  bool HasNews(uint32_t listening = Doorbell::kEverything);

  // Waiting.
  bool Wait(const Ready& ready, int awaited) override;
  bool SpinUntil(const Ready& ready, Clock::duration spin) const;
  bool SpinForNews();
  uint32_t Listening() const;
  void Rest(std::unique_lock<std::mutex>* driving);
  void SleepInCollective(const Ready& ready, bool stopping);
  void CheckForLostWake(uint32_t listening, bool has_news);

  // Submissions.
  Status Queue(std::unique_ptr<Operation> operation);
  Status CheckMember(const Description& description) const;
  Status Agree(Description description, int32_t* answer);
  void RingForSubmission();
  void SendTime(Clock::time_point submitted);
  void SendSubmission(const Description& description, bool duplicate);
  bool FlushSubmissions();

  // Decisions.
  bool ReadDecisions();
  void NoteDecision();
  void HandleDecision(std::string_view message);
  void HandleFail(std::string_view message);
  void HandleZeros(std::string_view message);
  void HandleAgree(std::string_view message);
  void HandleTune(std::string_view message);
  std::unique_ptr<Operation> Take(const TensorKey& key);
  void RunBatch(const std::vector<TensorKey>& keys);
  bool RunRecorded(const std::vector<std::unique_ptr<Operation>>& operations,
                   const std::vector<int>& members);
  bool RunCollective(const std::vector<std::unique_ptr<Operation>>& operations,
                     const std::vector<int>& members);
  bool RunAllreduce(const std::vector<std::unique_ptr<Operation>>& operations);
  bool RunAdasum(const AllreduceOptions& allreduce);
  bool RunAllgather(Operation* operation);
  bool RunAlltoall(Operation* operation);
  bool RunBroadcast(const Operation& operation, const std::vector<int>& members);
  bool RunReducescatter(const Operation& operation);
  void NoteRun(const std::vector<std::unique_ptr<Operation>>& operations,
               const std::vector<TensorKey>& keys);
  bool CheckOutputs(const std::vector<std::unique_ptr<Operation>>& operations,
                    const std::vector<int>& members);
  std::unique_ptr<Operation> TakePending(const TensorKey& key);
  void Finish(std::unique_ptr<Operation> operation, const Status& status);
  Status FailureOf(const std::string& title) const;

  // What goes wrong.
  void EndEverything(Code code, const std::string& reason);
  void ReportFailure();
  void CheckCoordinatorLeft();
  void CheckStalls();
  void CheckSilentCoordinator();
  void CheckStalledPeer(int awaited, Clock::time_point since);
  bool HasPending() const;

  const EngineOptions options_;
  const std::shared_ptr<Segment> segment_;
  const int rank_;
  RankBlock& block_;
  EngineCounters counters_;
  Communicator communicator_;
  Timeline timeline_;
  // Changed by who drives, under mutex_.
  std::map<int32_t, std::vector<int>> process_sets_;

  // What Submit and whoever drives share.
  std::mutex mutex_;
  std::unordered_map<TensorKey, Operations, TensorKeyHash> pending_;
  std::atomic<int64_t> pending_count_{0};
  StreamWriter submissions_;
  std::atomic<bool> overflowing_{false};  // submissions wait for room
  NumberTable<std::string> submission_numbers_;
  std::string time_message_;
  OperationLog log_;
  Status refusal_;  // what Submit answers once no more requests are taken

  // Held by who drives, but not while it rests.
  std::mutex driving_;
  std::atomic<int> callers_{0};  // that want to drive
  // Guarded by driving_.
  std::unique_ptr<Coordination> coordination_;  // on rank 0
  StreamReader decisions_;
  std::vector<TensorKey> dictionary_;
  // For the next batch: zeros for what this rank has joined before.
  std::unordered_map<TensorKey, std::unique_ptr<Operation>, TensorKeyHash> zeros_;
  std::deque<std::string> to_do_;  // decisions that are read and not carried out
  uint64_t sequence_ = 0;
  Tuning tuning_;
  bool decides_for_others_ = false;  // rank 0, of a set that it is not in
  uint64_t stall_reported_ = 0;      // sequence of the batch
  std::array<Stores, 2> stores_{};   // of the batch that runs, out of and in place
  std::string running_;              // title of the batch that runs
  bool failure_handled_ = false;
  Clock::time_point next_stall_check_;
  Clock::time_point waiting_since_ = Clock::time_point::max();  // for a decision
  bool was_idle_ = false;  // the last sleep ended without a ring

  // The last decision came so soon that the next one is worth spinning for.
  std::atomic<bool> prompt_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> resting_{false};  // asleep until somebody rings, stalls or not
  std::thread thread_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_ENGINE_ENGINE_H_
