// See engine.h.
#include "tf_ops/engine/engine.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <numeric>
#include <utility>

#include "tf_ops/collectives/adasum.h"
#include "tf_ops/collectives/allgather.h"
#include "tf_ops/collectives/allreduce.h"
#include "tf_ops/collectives/alltoall.h"
#include "tf_ops/collectives/barrier.h"
#include "tf_ops/collectives/broadcast.h"
#include "tf_ops/collectives/reducescatter.h"
#include "tf_ops/engine/log.h"
#include "tf_ops/engine/output_check.h"
#include "tf_ops/transport/faults.h"
#include "tf_ops/transport/liveness.h"

namespace keras_hvd {
namespace {

// How long a caller spins for who drives, with a core for each rank. A futex round trip
// takes about as long; more would only take time from the training. For a peer that is
// known to be ready it is the same, unless tuned.
constexpr std::chrono::microseconds kSpin(50);
// The same for a peer that is about to come: ranks that do the same work in TensorFlow
// between two collectives end it about that much apart.
constexpr std::chrono::microseconds kSpinForNews(200);
// What a decision may take, a rank's wake included, for the next one to be spun for.
constexpr std::chrono::microseconds kPromptWake(150);
// With fewer cores than ranks: how often it lets others run before it sleeps, and for
// how long. Where they take their whole time slices, yielding would go on for long, and
// they may be what keeps a killed rank from being seen.
constexpr int kYields = 100;
constexpr std::chrono::microseconds kLongestYields(1000);
// Up to here a collective takes less time than to have another thread run it.
constexpr int64_t kSmallBytes = 64 << 10;
// How long a rank that shuts down waits for the peers of a batch that runs.
constexpr std::chrono::seconds kShutdownPatience(5);
// How often waiting requests are looked at; only while there are any.
constexpr std::chrono::milliseconds kStallCheck(500);

constexpr char kShutDownHere[] = "keras_hvd was shut down on this rank";
// What the failure of another rank means for this one; other failures say it
// themselves.
std::string Advice(Code code) {
  if (code != Code::kRankFailed) return ". The job cannot go on";
  return ". The job cannot go on: see that rank's output for the reason, then start it "
         "again";
}

void Relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

std::vector<int> AllRanks(int size) {
  std::vector<int> ranks(size);
  for (int rank = 0; rank < size; ++rank) ranks[rank] = rank;
  return ranks;
}

int64_t RowBytes(const TensorDescription& tensor) {
  int64_t bytes = Bytes(tensor.dtype);
  for (size_t i = 1; i < tensor.shape.size(); ++i) bytes *= tensor.shape[i];
  return bytes;
}

int64_t InputBytes(const Operation& operation) {
  const Description& description = *operation.description;
  if (!HasOwnRows(description.kind)) return description.bytes();
  int64_t bytes = 0;
  for (size_t i = 0; i < operation.rows.size(); ++i) {
    bytes += operation.rows[i] * RowBytes(description.tensors[i]);
  }
  return bytes;
}

// Memory for the result of one of an operation's tensors, which gets `rows`.
void* AllocateResult(Operation* operation, size_t tensor,
                     const std::vector<int64_t>& rows) {
  void* memory = operation->allocate(tensor, rows);
  const int64_t sum = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  operation->out_of_memory |= memory == nullptr && sum > 0;
  operation->buffers[tensor].output = memory;
  operation->allocated_bytes.push_back(
      sum * RowBytes(operation->description->tensors[tensor]));
  return memory;
}

void LogBatch(int rank, uint64_t number,
              const std::vector<std::unique_ptr<Operation>>& operations) {
  int64_t bytes = 0;
  for (const auto& operation : operations) bytes += InputBytes(*operation);
  std::string text = "runs batch " + std::to_string(number) + ": " +
                     Title(*operations.front()->description);
  if (operations.size() > 1) {
    text += " and " + std::to_string(operations.size() - 1) + " more";
  }
  Log(rank, LogLevel::kDebug, text + ", " + std::to_string(bytes) + " bytes");
}

int64_t AllreduceBytes(const AllreduceOptions& options) {
  int64_t bytes = 0;
  for (const AllreduceTensor& tensor : options.tensors) {
    bytes += tensor.elements * Bytes(tensor.dtype);
  }
  return bytes;
}

// Whether most of the result replaces its input.
bool IsInPlace(const AllreduceOptions& options) {
  int64_t balance = 0;
  for (const AllreduceTensor& tensor : options.tensors) {
    const int64_t bytes = tensor.elements * Bytes(tensor.dtype);
    balance += tensor.output == tensor.input ? bytes : -bytes;
  }
  return balance >= 0;
}

// The name of agreements that must come in one order on all ranks.
constexpr char kProcessSets[] = "keras_hvd.process_sets";
constexpr char kJoin[] = "keras_hvd.join";

TensorKey KeyOf(const Description& description) {
  return {description.process_set, description.name};
}

}  // namespace

Engine::Engine(EngineOptions options, std::shared_ptr<Segment> segment)
    : options_(options),
      segment_(std::move(segment)),
      rank_(options.rank),
      block_(segment_->block(rank_)),
      communicator_(segment_, rank_, this),
      timeline_(segment_),
      submissions_(segment_->submissions(rank_), Segment::kSubmissionBytes,
                   &block_.submissions_written),
      submission_numbers_(options.cache_capacity),
      log_(&block_),
      decisions_(segment_->decisions(), Segment::kDecisionBytes,
                 &segment_->header().decisions_written, &block_.decisions_read) {
  process_sets_[0] = AllRanks(segment_->size());
  if (rank_ == 0) {
    coordination_ = std::make_unique<Coordination>(segment_, options_.fusion_bytes,
                                                   options_.cache_capacity, &timeline_);
    // Before the first decision, which is what the others read first.
    segment_->header().check.store(options_.check);
    if (options_.autotune.on && segment_->size() > 1) {
      AutotuneOptions autotune = options_.autotune;
      autotune.tunes_spin = options_.cores >= segment_->size();
      autotune.most_window_bytes = communicator_.exchange_bytes();
      Tuning defaults;
      defaults.fusion_bytes = options_.fusion_bytes;
      coordination_->StartAutotune(autotune, defaults);
    }
  }
  thread_ = std::thread([this] { Loop(); });
  pthread_setname_np(thread_.native_handle(), "keras_hvd");
}

Engine::~Engine() { Stop(); }

void Engine::Stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true);
  block_.bell.Ring();
  thread_.join();
  timeline_.Stop();
}

Status Engine::StartTimeline(const std::string& path, bool mark_cycles) {
  return rank_ == 0 ? timeline_.Start(path, mark_cycles) : Status::Ok();
}

void Engine::StopTimeline() { timeline_.Stop(); }

// ---- Driving

void Engine::Loop() {
  std::unique_lock<std::mutex> driving(driving_);
  while (true) {
    const bool progressed = Progress();
    if (RunNext()) continue;
    if (stopping_.load()) break;
    if (callers_.load() > 0) {
      GiveWay(&driving);
    } else if (!progressed && !SpinForNews()) {
      Rest(&driving);
    }
  }
  EndEverything(Code::kShutDown, kShutDownHere);
  // Decisions that were made are with the peers; now they may know that this rank is
  // gone.
  BeforeStore();
  block_.departure.store(static_cast<uint32_t>(Departure::kShutDown));
  segment_->RingAll();
}

Status Engine::Run(std::unique_ptr<Operation> operation) {
  struct Result {
    std::atomic<bool> ended{false};
    std::mutex mutex;
    std::condition_variable changed;
    Status status;
  } result;
  operation->done = [&result](const Status& status) {
    std::lock_guard<std::mutex> lock(result.mutex);
    result.status = status;
    result.ended.store(true);
    // Under the lock: the waiting thread takes the variable away as soon as it can.
    result.changed.notify_one();
  };
  const Status queued = Queue(std::move(operation));
  if (!queued.ok()) return queued;
  std::unique_lock<std::mutex> driving(driving_, std::defer_lock);
  callers_ += 1;
  // No longer than until the end: who drives may wait for what this thread does next.
  SpinUntil([&] { return result.ended.load() || driving.try_lock(); }, kSpin);
  callers_ -= 1;
  DriveOrRing(&driving, result.ended);
  std::unique_lock<std::mutex> lock(result.mutex);
  result.changed.wait(lock, [&] { return result.ended.load(); });
  return result.status;
}

Status Engine::SubmitAndDrive(std::unique_ptr<Operation> operation) {
  // Where others are under way, what comes next may be one that takes long.
  const bool alone = !HasPending();
  if (!alone || InputBytes(*operation) > kSmallBytes) {
    return Submit(std::move(operation));
  }
  const auto ending = std::make_shared<Ending>();
  operation->ending = ending;
  const std::function<void(const Status&)> done = operation->done;
  const Status queued = Queue(std::move(operation));
  if (!queued.ok()) return queued;
  std::unique_lock<std::mutex> driving(driving_, std::try_to_lock);
  DriveOrRing(&driving, ending->ended);
  if (ending->claimed.exchange(true)) done(ending->status);
  return Status::Ok();
}

// Somebody has to see to what was just queued: this thread, if it may drive.
void Engine::DriveOrRing(std::unique_lock<std::mutex>* driving,
                         const std::atomic<bool>& ended) {
  if (!driving->owns_lock()) return RingForSubmission();
  if (rank_ != 0) segment_->block(0).bell.Ring(Doorbell::kSubmission);
  Drive(ended);
  driving->unlock();
}

// Drives while there is something to do, or soon may be, instead of the engine's
// thread; leaves the rest to it.
void Engine::Drive(const std::atomic<bool>& ended) {
  // The engine's thread sleeps on: nobody needs to wake it while this one looks.
  block_.bell.Cancel();
  while (!ended.load(std::memory_order_relaxed) && !stopping_.load()) {
    const bool progressed = Progress();
    if (!RunNext() && !progressed && !SpinForNews()) break;
  }
  LeaveDriving();
}

// What has come meanwhile is taken in here where that is all there is to do; waking the
// engine's thread would cost more, and this thread may be back at once.
void Engine::LeaveDriving() {
  block_.bell.Announce(Listening());
  if (HasNews(Listening())) {
    block_.bell.Cancel();
    Progress();
    block_.bell.Announce(Listening());
  }
  // The ring needs the announcement: the engine's thread may sleep since before it.
  if (HasPending() || HasNews(Listening()) || !to_do_.empty() || stopping_.load()) {
    block_.bell.Ring();
  }
}

// Callers come first. One takes over, or has its result already, within a moment.
void Engine::GiveWay(std::unique_lock<std::mutex>* driving) {
  driving->unlock();
  SpinUntil([this] { return callers_.load() == 0; }, kSpin);
  driving->lock();
}

// Everything that can be done without waiting, but for running collectives.
bool Engine::Progress() {
  if (failure_handled_) return false;
  bool progressed = FlushSubmissions();
  if (coordination_ != nullptr) progressed |= coordination_->Progress();
  progressed |= ReadDecisions();
  CheckStalls();
  if (rank_ != 0 && to_do_.empty() && block_.departure.load() == 0)
    CheckCoordinatorLeft();
  return progressed;
}

// Carries out a decision, if there is one and the job has not failed.
bool Engine::RunNext() {
  if (failure_handled_) return false;
  if (segment_->Failed()) {
    ReportFailure();
    return true;
  }
  if (to_do_.empty()) return false;
  const std::string message = std::move(to_do_.front());
  to_do_.pop_front();
  HandleDecision(message);
  return true;
}

bool Engine::HasNews(uint32_t listening) {
  if (failure_handled_) return false;
  if (segment_->Failed() || decisions_.HasNews()) return true;
  if (coordination_ != nullptr) {
    if (coordination_->HasNews()) return true;
    const bool listens = (listening & Doorbell::kSubmission) != 0;
    if (listens && coordination_->HasSubmissions()) return true;
  }
  return overflowing_.load() && block_.submissions_blocked.load() == 0;
}

// ---- Waiting

bool Engine::Wait(const Ready& ready, int awaited) {
  const std::chrono::microseconds spin(tuning_.spin_microseconds);
  if (SpinUntil(ready, spin)) return true;
  const Clock::time_point since = Clock::now();
  Clock::time_point stop_at = Clock::time_point::max();
  while (true) {
    Progress();
    if (ready()) return true;
    if (segment_->Failed()) return false;
    const RankBlock& peer = segment_->block(awaited);
    if (peer.HasShutDown() && !ready()) {
      segment_->Fail(rank_, Code::kRankFailed,
                     DescribeRank(*segment_, awaited) +
                         " left the job in the middle of " + running_);
      return false;
    }
    const bool stopping = stopping_.load();
    if (stopping && stop_at == Clock::time_point::max()) {
      stop_at = Clock::now() + kShutdownPatience;
    }
    if (Clock::now() >= stop_at) return false;
    CheckStalledPeer(awaited, since);
    SleepInCollective(ready, stopping);
  }
}

bool Engine::SpinUntil(const Ready& ready, Clock::duration spin) const {
  if (options_.cores < segment_->size()) {
    const Clock::time_point end = Clock::now() + kLongestYields;
    for (int i = 0; i < kYields; ++i) {
      if (ready()) return true;
      sched_yield();
      if (Clock::now() > end) break;
    }
    return ready();
  }
  const Clock::time_point end = Clock::now() + spin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      Relax();
    }
  } while (Clock::now() < end);
  return ready();
}

// Outside of a collective nobody knows when the peers will be ready. A rank spins for
// them where it took them no longer the last time: in a loop of collectives, not in a
// training whose ranks end their steps at different times.
bool Engine::SpinForNews() {
  if (!HasPending()) return false;
  if (waiting_since_ == Clock::time_point::max()) waiting_since_ = Clock::now();
  if (!prompt_.load()) return false;
  const auto due = [this] { return HasNews() || callers_.load() > 0; };
  if (SpinUntil(due, kSpinForNews)) return true;
  prompt_.store(false);
  return false;
}

// Sleeps until there is something to do. Only while something waits does it wake up by
// itself, to look for stalls: an idle engine uses no time. It rests, so that the next
// submission has to wake it, only after a while without any: in a loop of collectives
// that would cost each of them a wake.
//
// All that a ring may be about is looked at after the announcement.
void Engine::Rest(std::unique_lock<std::mutex>* driving) {
  const uint32_t listening = Listening();
  block_.bell.Announce(listening);
  resting_.store(was_idle_);
  const bool watchful = HasPending() || !was_idle_ ||
                        (coordination_ != nullptr && coordination_->anything_waits());
  if (watchful) resting_.store(false);
  // A ring about what this was not listening to yet has been missed.
  const bool listens = listening == Listening();
  if (!listens || HasNews(listening) || stopping_.load()) return block_.bell.Cancel();
  counters_.sleeps += 1;
  const Clock::time_point deadline = watchful && !failure_handled_
                                         ? Clock::now() + kStallCheck
                                         : Clock::time_point::max();
  driving->unlock();
  const bool rung = block_.bell.Sleep(deadline, listening);
  // Where a caller drives meanwhile, the news may be its own.
  const bool alone = driving->try_lock();
  if (!alone) driving->lock();
  was_idle_ = !rung;
  if (rung || !alone) return;
  CheckForLostWake(listening, HasNews(Listening()));
  block_.bell.Cancel();
}

// After a sleep that no ring has ended. Who published the news may have been held up
// before it could ring; but ring it must.
void Engine::CheckForLostWake(uint32_t listening, bool has_news) {
  if (!has_news || block_.bell.Sleep(Clock::now() + kStallCheck, listening)) return;
  counters_.lost_wakes += 1;
}

// What wakes an engine outside of a collective. Nothing can be decided without rank 0's
// own submission, so it sleeps through those of others while it has none under way;
// unless there is a process set without it.
uint32_t Engine::Listening() const {
  const bool decides = decides_for_others_ || HasPending();
  return Doorbell::kNews | (decides ? Doorbell::kSubmission : 0);
}

// The same in the middle of a collective, which nobody else may go on with. `stopping`
// is what the caller has seen, and acted on, of the wish to stop.
void Engine::SleepInCollective(const Ready& ready, bool stopping) {
  const auto due = [&] { return ready() || HasNews(); };
  block_.bell.Announce();
  if (due() || stopping_.load() != stopping) return block_.bell.Cancel();
  counters_.sleeps += 1;
  if (block_.bell.Sleep(Clock::now() + kStallCheck)) return;
  CheckForLostWake(Doorbell::kEverything, due());
  block_.bell.Cancel();
}

bool Engine::HasPending() const { return pending_count_.load() > 0; }

// ---- Submissions

Status Engine::Submit(std::unique_ptr<Operation> operation) {
  const Status queued = Queue(std::move(operation));
  if (queued.ok()) RingForSubmission();
  return queued;
}

void Engine::RingForSubmission() {
  RankBlock& coordinator = segment_->block(0);
  coordinator.bell.Ring(rank_ == 0 ? Doorbell::kEverything : Doorbell::kSubmission);
  // Its own engine is woken where it will have something to do at once, and where
  // nobody decides any more or watches whether somebody does.
  if (rank_ != 0 && (prompt_.load(std::memory_order_relaxed) || resting_.load() ||
                     coordinator.HasShutDown())) {
    block_.bell.Ring();
  }
}

Status Engine::Queue(std::unique_ptr<Operation> operation) {
  const std::shared_ptr<const Description> description = operation->description;
  if (LogEnabled(LogLevel::kTrace)) {
    Log(rank_, LogLevel::kTrace, "submits " + Title(*description));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (!refusal_.ok()) {
    return {refusal_.code, Title(*description) + " failed on rank " +
                               std::to_string(rank_) + ": " + refusal_.message};
  }
  const Status wrong = CheckMember(*description);
  if (!wrong.ok()) return wrong;
  Operations& same_name = pending_[KeyOf(*description)];
  const bool duplicate =
      !same_name.empty() && same_name.back()->submitter != operation->submitter;
  operation->submitted = Clock::now();
  if (segment_->header().WantsTimes()) SendTime(operation->submitted);
  operation->log_number = log_.Add(*description);
  same_name.push_back(std::move(operation));
  pending_count_ += 1;
  SendSubmission(*description, duplicate);
  return Status::Ok();
}

// What the peers must never wait for. Under mutex_.
Status Engine::CheckMember(const Description& description) const {
  const auto set = process_sets_.find(description.process_set);
  const std::string id = std::to_string(description.process_set);
  if (set == process_sets_.end()) {
    return Status::InvalidArgument(
        Title(description) + " failed on rank " + std::to_string(rank_) +
        ": there is no process set " + id + ": it was not added, or has been removed");
  }
  const std::vector<int>& members = set->second;
  const std::string where =
      " is not in process set " + id + " (" + RankList(members) + ")";
  if (!std::binary_search(members.begin(), members.end(), rank_)) {
    return Status::InvalidArgument(Title(description) + " failed: rank " +
                                   std::to_string(rank_) + where);
  }
  if (description.kind == Kind::kBroadcast &&
      !std::binary_search(members.begin(), members.end(), description.root)) {
    return Status::InvalidArgument(Title(description) + " failed on rank " +
                                   std::to_string(rank_) + ": root_rank " +
                                   std::to_string(description.root) + where);
  }
  if (description.kind == Kind::kJoin && pending_.count(KeyOf(description)) != 0) {
    return Status::InvalidArgument("join() failed: rank " + std::to_string(rank_) +
                                   " has joined already, in another thread");
  }
  return Status::Ok();
}

// Rank 0 may read the submission much later.
void Engine::SendTime(Clock::time_point submitted) {
  const std::chrono::nanoseconds time = submitted.time_since_epoch();
  time_message_.clear();
  EncodeInteger(static_cast<int64_t>(SubmissionMessage::kTime), &time_message_);
  EncodeInteger(time.count(), &time_message_);
  submissions_.Append(time_message_);
}

void Engine::SendSubmission(const Description& description, bool duplicate) {
  std::string encoded;
  Encode(description, &encoded);
  bool is_new;
  submission_numbers_.Reserve(1);
  const int64_t number = submission_numbers_.Number(encoded, &is_new);
  std::string message;
  if (is_new) {
    EncodeInteger(static_cast<int64_t>(SubmissionMessage::kDefine), &message);
    EncodeInteger(number, &message);
    submissions_.Append(message + encoded);
    message.clear();
  }
  const SubmissionMessage type =
      duplicate ? SubmissionMessage::kSubmitDuplicate : SubmissionMessage::kSubmit;
  EncodeInteger(static_cast<int64_t>(type), &message);
  EncodeInteger(number, &message);
  submissions_.Append(message);
  submissions_.Flush(block_.submissions_read.value.load(std::memory_order_acquire));
  // What did not fit is for who drives, who can wait for room.
  overflowing_.store(submissions_.blocked());
  if (submissions_.blocked()) block_.bell.Ring();
}

bool Engine::FlushSubmissions() {
  if (!overflowing_.load()) return false;
  bool flushed = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    while (submissions_.blocked()) {
      if (submissions_.Flush(block_.submissions_read.value.load())) {
        flushed = true;
        continue;
      }
      // Announced, then looked at again: the reader either sees this or has made room.
      BeforeStore();
      if (block_.submissions_blocked.exchange(1) == 1) break;
    }
    overflowing_.store(submissions_.blocked());
  }
  if (flushed) segment_->block(0).bell.Ring();
  return flushed;
}

// ---- Agreements

Status Engine::AddProcessSet(const std::vector<int>& ranks, int32_t* id) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    const bool ascending = i == 0 || ranks[i] > ranks[i - 1];
    if (ascending && ranks[i] >= 0 && ranks[i] < segment_->size()) continue;
    return Status::InvalidArgument("a process set has ranks of 0.." +
                                   std::to_string(segment_->size() - 1) +
                                   ", ascending; got " + RankList(ranks));
  }
  if (ranks.empty()) return Status::InvalidArgument("a process set has a rank");
  Description description;
  description.kind = Kind::kAddProcessSet;
  description.name = kProcessSets;
  description.members = ranks;
  return Agree(std::move(description), id);
}

Status Engine::RemoveProcessSet(int32_t id) {
  Description description;
  description.kind = Kind::kRemoveProcessSet;
  description.name = kProcessSets;
  const Status known = MembersOf(id, &description.members);
  if (!known.ok()) return known;
  if (id == 0) {
    return Status::InvalidArgument("process set 0, of all ranks, cannot be removed");
  }
  return Agree(std::move(description), nullptr);
}

Status Engine::Join(int32_t* last) {
  Description description;
  description.kind = Kind::kJoin;
  description.name = kJoin;
  return Agree(std::move(description), last);
}

Status Engine::MembersOf(int32_t process_set, std::vector<int>* ranks) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto set = process_sets_.find(process_set);
  if (set == process_sets_.end()) {
    return Status::InvalidArgument("there is no process set " +
                                   std::to_string(process_set) +
                                   ": it was not added, or has been removed");
  }
  *ranks = set->second;
  return Status::Ok();
}

Status Engine::Agree(Description description, int32_t* answer) {
  auto operation = std::make_unique<Operation>();
  operation->description = std::make_shared<Description>(std::move(description));
  operation->answer = answer;
  return Run(std::move(operation));
}

// ---- Decisions

bool Engine::ReadDecisions() {
  if (!decisions_.Fill()) return false;
  NoteDecision();
  std::string_view message;
  while (decisions_.Next(&message)) to_do_.emplace_back(message);
  SegmentHeader& header = segment_->header();
  BeforeStore();
  if (header.decisions_blocked.exchange(0) == 1) segment_->block(0).bell.Ring();
  return true;
}

// Learns from how long the decision took whether to spin for the next one. Who slept
// has waited for its wake as well.
void Engine::NoteDecision() {
  const Clock::time_point since =
      std::exchange(waiting_since_, Clock::time_point::max());
  const Clock::duration soon = prompt_.load() ? kSpinForNews : kPromptWake;
  prompt_.store(since == Clock::time_point::max() || Clock::now() - since < soon);
}

void Engine::HandleDecision(std::string_view message) {
  int64_t type, number;
  if (!DecodeInteger(&message, &type)) return;
  switch (static_cast<DecisionMessage>(type)) {
    case DecisionMessage::kDefine: {
      int64_t process_set;
      TensorKey key;
      DecodeInteger(&message, &number);
      DecodeInteger(&message, &process_set);
      DecodeText(&message, &key.name);
      key.process_set = static_cast<int32_t>(process_set);
      if (dictionary_.size() <= static_cast<size_t>(number))
        dictionary_.resize(number + 1);
      dictionary_[number] = std::move(key);
      return;
    }
    case DecisionMessage::kRun: {
      for (Stores& choice : stores_) {
        int64_t stores;
        DecodeInteger(&message, &stores);
        choice = static_cast<Stores>(stores);
      }
      std::vector<TensorKey> keys;
      while (DecodeInteger(&message, &number)) keys.push_back(dictionary_[number]);
      return RunBatch(keys);
    }
    case DecisionMessage::kFail:
      return HandleFail(message);
    case DecisionMessage::kZeros:
      return HandleZeros(message);
    case DecisionMessage::kAgree:
      return HandleAgree(message);
    case DecisionMessage::kTune:
      return HandleTune(message);
  }
}

void Engine::HandleFail(std::string_view message) {
  int64_t number, departed, count, rank;
  std::string text;
  DecodeInteger(&message, &number);
  DecodeInteger(&message, &departed);
  DecodeInteger(&message, &count);
  bool concerned = false;
  for (int64_t i = 0; i < count; ++i) {
    DecodeInteger(&message, &rank);
    concerned |= rank == rank_;
  }
  DecodeText(&message, &text);
  if (!concerned) return;
  std::unique_ptr<Operation> operation = TakePending(dictionary_[number]);
  if (operation == nullptr) return;
  const Code code = departed ? Code::kRankFailed : Code::kInvalidArgument;
  const std::string title = Title(*operation->description);
  Finish(std::move(operation),
         {code, title + " failed on rank " + std::to_string(rank_) + ": " + text});
}

void Engine::HandleAgree(std::string_view message) {
  int64_t number, kind, answer, member;
  DecodeInteger(&message, &number);
  DecodeInteger(&message, &kind);
  DecodeInteger(&message, &answer);
  std::vector<int> members;
  while (DecodeInteger(&message, &member)) members.push_back(static_cast<int>(member));
  const auto id = static_cast<int32_t>(answer);
  if (static_cast<Kind>(kind) != Kind::kJoin) {
    std::lock_guard<std::mutex> lock(mutex_);
    process_sets_.erase(id);
    if (static_cast<Kind>(kind) == Kind::kAddProcessSet) process_sets_[id] = members;
  }
  decides_for_others_ =
      rank_ == 0 &&
      std::any_of(process_sets_.begin(), process_sets_.end(),
                  [](const auto& set) { return set.second.front() != 0; });
  std::unique_ptr<Operation> operation = TakePending(dictionary_[number]);
  if (operation == nullptr) return;
  if (operation->answer != nullptr) *operation->answer = id;
  Finish(std::move(operation), Status::Ok());
}

// The one order of the decisions has all ranks change this between the same batches.
void Engine::HandleTune(std::string_view message) {
  DecodeInteger(&message, &tuning_.window_bytes);
  DecodeInteger(&message, &tuning_.small_bytes);
  DecodeInteger(&message, &tuning_.spin_microseconds);
  counters_.tunings += 1;
  if (coordination_ != nullptr) coordination_->NoteTuned();
}

// Ranks that have joined take part in the next batch with zeros.
void Engine::HandleZeros(std::string_view message) {
  int64_t count, rank;
  DecodeInteger(&message, &count);
  bool concerned = false;
  for (int64_t i = 0; i < count; ++i) {
    DecodeInteger(&message, &rank);
    concerned |= rank == rank_;
  }
  if (!concerned) return;
  auto description = std::make_shared<Description>();
  Decode(&message, description.get());
  auto operation = std::make_unique<Operation>();
  const auto lines = [](const TensorDescription& tensor) {
    const size_t bytes = Elements(tensor) * Bytes(tensor.dtype);
    return (bytes + sizeof(Operation::Line) - 1) / sizeof(Operation::Line);
  };
  size_t needed = 0;
  for (const TensorDescription& tensor : description->tensors) needed += lines(tensor);
  operation->zeros.resize(needed);
  Operation::Line* line = operation->zeros.data();
  for (const TensorDescription& tensor : description->tensors) {
    operation->buffers.push_back({line, line});
    line += lines(tensor);
  }
  operation->done = [](const Status&) {};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    operation->log_number = log_.Add(*description);
  }
  TensorKey key = KeyOf(*description);
  operation->description = std::move(description);
  zeros_[std::move(key)] = std::move(operation);
}

// What the rank has submitted under the name, or the zeros that stand for it.
std::unique_ptr<Operation> Engine::Take(const TensorKey& key) {
  const auto zeros = zeros_.find(key);
  if (zeros == zeros_.end()) return TakePending(key);
  std::unique_ptr<Operation> operation = std::move(zeros->second);
  zeros_.erase(zeros);
  return operation;
}

// All ranks count all batches, so that the numbers agree on those that share one.
void Engine::RunBatch(const std::vector<TensorKey>& keys) {
  sequence_ += 1;
  const std::vector<int>& members = process_sets_[keys.front().process_set];
  if (!std::binary_search(members.begin(), members.end(), rank_)) return;
  std::vector<std::unique_ptr<Operation>> operations;
  for (const TensorKey& key : keys) {
    operations.push_back(Take(key));
    if (operations.back() != nullptr) continue;
    segment_->Fail(rank_, Code::kInternal,
                   "rank " + std::to_string(rank_) + " was told to run '" + key.name +
                       "', which it has not submitted. This is a bug in keras_hvd");
    operations.pop_back();
    for (auto& operation : operations) {
      const std::string title = Title(*operation->description);
      Finish(std::move(operation), FailureOf(title));
    }
    return;
  }
  running_ = Title(*operations.front()->description);
  counters_.batches += 1;
  if (LogEnabled(LogLevel::kDebug)) LogBatch(rank_, sequence_, operations);
  const bool ok = RunRecorded(operations, members);
  running_.clear();
  if (ok) NoteRun(operations, keys);
  for (auto& operation : operations) {
    const std::string title = Title(*operation->description);
    Status status;
    if (!ok) {
      status = FailureOf(title);
    } else if (operation->out_of_memory) {
      status = Status::Internal(title + ": there is no memory for the result on rank " +
                                std::to_string(rank_));
    }
    Finish(std::move(operation), status);
  }
}

// For who tunes the engine. Only allreduces change with the settings, but for spinning.
void Engine::NoteRun(const std::vector<std::unique_ptr<Operation>>& operations,
                     const std::vector<TensorKey>& keys) {
  if (coordination_ == nullptr || !coordination_->tunes()) return;
  if (operations.front()->description->kind != Kind::kAllreduce) return;
  int64_t bytes = 0;
  for (const auto& operation : operations) bytes += InputBytes(*operation);
  if (bytes > 0) coordination_->NoteRun(keys, bytes);
}

// Why a collective that ran has failed: the job has, or this rank stopped waiting.
Status Engine::FailureOf(const std::string& title) const {
  const std::string where = title + " failed on rank " + std::to_string(rank_) + ": ";
  const Status failure = segment_->Failure();
  if (failure.ok()) return {Code::kShutDown, where + kShutDownHere};
  return {failure.code, where + failure.message + Advice(failure.code)};
}

bool Engine::RunRecorded(const std::vector<std::unique_ptr<Operation>>& operations,
                         const std::vector<int>& members) {
  PhaseRecorder* const recorder = timeline_.BeginBatch(sequence_);
  communicator_.set_recorder(recorder);
  const bool ok = RunCollective(operations, members);
  if (recorder != nullptr) timeline_.EndBatch(ok);
  return ok;
}

bool Engine::RunCollective(const std::vector<std::unique_ptr<Operation>>& operations,
                           const std::vector<int>& members) {
  for (const auto& operation : operations) {
    std::lock_guard<std::mutex> lock(mutex_);
    log_.Update(operation->log_number, Phase::kRunning);
  }
  if (!communicator_.Begin(members, sequence_)) return false;
  bool ok = false;
  switch (operations.front()->description->kind) {
    case Kind::kAllreduce:
      ok = RunAllreduce(operations);
      break;
    case Kind::kAllgather:
      ok = RunAllgather(operations.front().get());
      break;
    case Kind::kBroadcast:
      ok = RunBroadcast(*operations.front(), members);
      break;
    case Kind::kBarrier:
      ok = Barrier(&communicator_);
      break;
    case Kind::kReducescatter:
      ok = RunReducescatter(*operations.front());
      break;
    case Kind::kAlltoall:
      ok = RunAlltoall(operations.front().get());
      break;
    case Kind::kAddProcessSet:
    case Kind::kRemoveProcessSet:
    case Kind::kJoin:
      break;  // decided as agreements, not as batches
  }
  if (ok && segment_->header().check.load(std::memory_order_relaxed) != 0) {
    ok = CheckOutputs(operations, members);
  }
  if (ok) communicator_.End();
  return ok;
}

// The consistency mode: all members find the same difference; one says so for all.
bool Engine::CheckOutputs(const std::vector<std::unique_ptr<Operation>>& operations,
                          const std::vector<int>& members) {
  if (members.size() == 1 || operations.front()->buffers.empty()) return true;
  // Of these each member gets something else.
  const Kind kind = operations.front()->description->kind;
  if (kind == Kind::kReducescatter || kind == Kind::kAlltoall) return true;
  std::string difference;
  if (!CompareOutputs(operations, members, &communicator_, &difference)) return false;
  if (difference.empty()) return true;
  segment_->Fail(rank_, Code::kInternal, difference);
  return false;
}

bool Engine::RunAllreduce(const std::vector<std::unique_ptr<Operation>>& operations) {
  AllreduceOptions allreduce;
  allreduce.reduction = operations.front()->description->reduction;
  for (const auto& operation : operations) {
    const std::vector<TensorDescription>& tensors = operation->description->tensors;
    for (size_t i = 0; i < tensors.size(); ++i) {
      allreduce.tensors.push_back({tensors[i].dtype, Elements(tensors[i]),
                                   operation->buffers[i].input,
                                   operation->buffers[i].output});
    }
  }
  if (allreduce.reduction.op == ReduceOp::kAdasum) return RunAdasum(allreduce);
  const bool in_place = IsInPlace(allreduce);
  allreduce.stores = stores_[in_place ? 1 : 0];
  allreduce.window_bytes = tuning_.window_bytes;
  allreduce.small_bytes = tuning_.small_bytes;
  const Clock::time_point start = Clock::now();
  if (!Allreduce(allreduce, &communicator_)) return false;
  if (coordination_ != nullptr) {
    const std::chrono::duration<double> taken = Clock::now() - start;
    coordination_->Learn(AllreduceBytes(allreduce), in_place, allreduce.stores,
                         taken.count());
  }
  return true;
}

bool Engine::RunAdasum(const AllreduceOptions& allreduce) {
  const Reduction& reduction = allreduce.reduction;
  return Adasum({reduction.prescale, reduction.postscale, allreduce.tensors},
                &communicator_);
}

bool Engine::RunAllgather(Operation* operation) {
  AllgatherOptions allgather;
  for (size_t i = 0; i < operation->buffers.size(); ++i) {
    AllgatherTensor& tensor = allgather.tensors.emplace_back();
    tensor.input = operation->buffers[i].input;
    tensor.rows = operation->rows[i];
    tensor.row_bytes = RowBytes(operation->description->tensors[i]);
    tensor.allocate = [operation, i](const std::vector<int64_t>& rows) {
      return AllocateResult(operation, i, rows);
    };
  }
  return Allgather(allgather, &communicator_);
}

bool Engine::RunAlltoall(Operation* operation) {
  AlltoallOptions alltoall;
  alltoall.input = operation->buffers.front().input;
  alltoall.splits = operation->splits;
  alltoall.row_bytes = RowBytes(operation->description->tensors.front());
  alltoall.allocate = [operation](const std::vector<int64_t>& rows) {
    return AllocateResult(operation, 0, rows);
  };
  return Alltoall(alltoall, &communicator_);
}

bool Engine::RunBroadcast(const Operation& operation, const std::vector<int>& members) {
  BroadcastOptions broadcast;
  broadcast.root =
      std::lower_bound(members.begin(), members.end(), operation.description->root) -
      members.begin();
  broadcast.bytes = operation.description->bytes();
  broadcast.input = operation.buffers.front().input;
  broadcast.output = operation.buffers.front().output;
  return Broadcast(broadcast, &communicator_);
}

bool Engine::RunReducescatter(const Operation& operation) {
  ReducescatterOptions reducescatter;
  reducescatter.reduction = operation.description->reduction;
  for (size_t i = 0; i < operation.buffers.size(); ++i) {
    const TensorDescription& tensor = operation.description->tensors[i];
    reducescatter.tensors.push_back(
        {tensor.dtype, tensor.shape.front(), RowBytes(tensor) / Bytes(tensor.dtype),
         operation.buffers[i].input, operation.buffers[i].output});
  }
  return Reducescatter(reducescatter, &communicator_);
}

std::unique_ptr<Operation> Engine::TakePending(const TensorKey& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pending_.find(key);
  if (found == pending_.end()) return nullptr;
  std::unique_ptr<Operation> operation = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) pending_.erase(found);
  pending_count_ -= 1;
  return operation;
}

void Engine::Finish(std::unique_ptr<Operation> operation, const Status& status) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    log_.Update(operation->log_number, status.ok() ? Phase::kDone : Phase::kFailed);
  }
  counters_.tensors += 1;
  counters_.bytes += InputBytes(*operation);
  if (operation->ending == nullptr) return operation->done(status);
  Ending& ending = *operation->ending;
  ending.status = status;
  ending.ended.store(true);
  if (ending.claimed.exchange(true)) operation->done(status);
}

// ---- What goes wrong

// Ends all that waits, and answers all later requests, with `reason`.
void Engine::EndEverything(Code code, const std::string& reason) {
  std::vector<std::unique_ptr<Operation>> operations;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (refusal_.ok() || code == Code::kShutDown) refusal_ = {code, reason};
    for (auto& [key, same_name] : pending_) {
      for (auto& operation : same_name) operations.push_back(std::move(operation));
    }
    pending_.clear();
    pending_count_ = 0;
  }
  for (auto& operation : operations) {
    const std::string title = Title(*operation->description);
    Finish(std::move(operation),
           {code, title + " failed on rank " + std::to_string(rank_) + ": " + reason});
  }
}

// The job has failed. One rank says so for all, and says who was where.
void Engine::ReportFailure() {
  failure_handled_ = true;
  const Status failure = segment_->Failure();
  // A rank that is crashing itself may not live to finish the report.
  const bool crashing = block_.departure.load() != 0;
  if (!crashing && segment_->header().report_claimed.exchange(1) == 0) {
    Log(rank_, LogLevel::kError,
        failure.message +
            "\nWhat each rank did last:" + ReportOperations(segment_.get()));
  }
  EndEverything(failure.code, failure.message + Advice(failure.code));
}

// Without rank 0 nothing is decided any more. What it decided before is carried out.
void Engine::CheckCoordinatorLeft() {
  if (!segment_->block(0).HasShutDown() || decisions_.HasNews()) return;
  if (!HasPending() || segment_->Failed()) return;
  segment_->Fail(
      rank_, Code::kRankFailed,
      DescribeRank(*segment_, 0) +
          " has left the job: its script ended or called shutdown, while others "
          "still had work for it");
}

void Engine::CheckStalls() {
  const Clock::time_point now = Clock::now();
  if (now < next_stall_check_) return;
  next_stall_check_ = now + kStallCheck;
  if (coordination_ != nullptr) {
    return coordination_->CheckStalls(options_.stall_warning_seconds,
                                      options_.stall_abort_seconds);
  }
  // Rank 0 may not have looked, for want of a request of its own, at what waits here.
  if (HasPending()) segment_->block(0).bell.Ring();
  CheckSilentCoordinator();
}

// Rank 0 reports stalls, but not its own: if it decides nothing, another rank has a
// look.
void Engine::CheckSilentCoordinator() {
  if (options_.stall_warning_seconds < 0 || !running_.empty()) return;
  Clock::time_point oldest = Clock::time_point::max();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [key, same_name] : pending_) {
      oldest = std::min(oldest, same_name.front()->submitted);
    }
  }
  if (oldest == Clock::time_point::max()) return;
  const double waited = std::chrono::duration<double>(Clock::now() - oldest).count();
  if (waited < options_.stall_warning_seconds) return;
  const char state = ProcessState(segment_->block(0).pid.load());
  if (state != 'T' && state != 't' && state != 'D') return;
  CheckStalledPeer(0, oldest);
}

void Engine::CheckStalledPeer(int awaited, Clock::time_point since) {
  const double waited = std::chrono::duration<double>(Clock::now() - since).count();
  const auto text = [&] {
    const char state = ProcessState(segment_->block(awaited).pid.load());
    std::string text = DescribeRank(*segment_, awaited) + " has not answered for " +
                       std::to_string(static_cast<int>(waited)) + " s";
    if (!running_.empty()) text += " in " + running_;
    if (state == 'T' || state == 't') text += "; its process is stopped (kill -CONT)";
    if (state == 'D') text += "; its process waits for the disk or the network";
    return text;
  };
  if (options_.stall_abort_seconds > 0 && waited >= options_.stall_abort_seconds) {
    segment_->Fail(rank_, Code::kRankFailed,
                   text() + ". The job was ended by KERAS_HVD_STALL_ABORT_SECONDS");
    return;
  }
  if (options_.stall_warning_seconds < 0 || waited < options_.stall_warning_seconds)
    return;
  // One warning for all ranks and for each batch; batch numbers agree between ranks.
  // Disjoint sets may stall in different ones at the same time: hence a rank's own
  // note.
  const uint64_t stalled = sequence_ + 1;
  if (std::exchange(stall_reported_, stalled) == stalled) return;
  if (segment_->header().stall_reported.exchange(stalled) == stalled) return;
  Log(rank_, LogLevel::kWarning, text());
}

}  // namespace keras_hvd
