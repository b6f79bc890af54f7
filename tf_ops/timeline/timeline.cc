#include "tf_ops/timeline/timeline.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "tf_ops/operation/log.h"
#include "tf_ops/transport/threads.h"

namespace keras_hvd {
namespace {

// Less than 1 MiB, enough for about ten training steps.
constexpr size_t kRingRecords = 8192;
// Kept free for the phases of batches that are already decided.
constexpr size_t kRoomForPhases = 1024;
// How often the thread writes, and how much it may compute then: half a percent.
constexpr std::chrono::milliseconds kPeriod(100);
constexpr int64_t kComputingNanoseconds = 500'000;
constexpr int kLeastPriority = 19;
// Number of records between two checks of the computing time.
constexpr int kBetweenLooks = 64;
// A request that waits for longer is written before it is decided.
constexpr double kLongWait = 1;
// How long a stop waits for batches on the GPU, which is checked every 100 ms.
constexpr std::chrono::milliseconds kPatienceForGpu(500);
constexpr std::chrono::milliseconds kBetweenRings(20);

int64_t Nanoseconds(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

int64_t FromSeconds(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

}  // namespace

Timeline::Timeline(std::shared_ptr<JobState> job) : job_(std::move(job)) {}

Timeline::~Timeline() { StopAll(); }

// ---- Start and stop

Status Timeline::Start(const std::string& path, bool mark_cycles) {
  std::lock_guard<std::mutex> lock(control_);
  if (file_ != nullptr) {
    return Status::InvalidArgument("a timeline is being written to '" + path_ +
                                   "' already: call stop_timeline() before '" + path +
                                   "'");
  }
  auto file = std::make_unique<TimelineFile>();
  KHVD_RETURN_IF_ERROR(file->Open(path));
  path_ = path;
  {
    std::lock_guard<std::mutex> written(written_);
    file_ = std::move(file);
    writer_ =
        std::make_unique<TimelineWriter>(file_.get(), job_.get(), NowNanoseconds());
    noted_requests_ = skipped_requests_.load();
    noted_phases_ = skipped_phases_.load();
    said_failure_ = false;
  }
  mark_cycles_.store(mark_cycles);
  const Status begun = Begin();
  if (!begun.ok()) CloseFile();
  return begun;
}

void Timeline::Stop() {
  std::lock_guard<std::mutex> lock(control_);
  if (file_ == nullptr) return;
  if (recording_ == nullptr) {
    End();
  } else {
    AwaitGpu();
  }
  std::lock_guard<std::mutex> written(written_);
  if (recording_ != nullptr) Drain(true);
  CloseFile();
}

void Timeline::CloseFile() {
  mark_cycles_.store(false);
  file_->Close();
  writer_.reset();
  file_.reset();
}

Status Timeline::StartRecording(const std::string& path) {
  std::lock_guard<std::mutex> lock(control_);
  if (recording_ != nullptr) {
    return Status::InvalidArgument("this job has a recording already, and only one");
  }
  auto file = std::make_unique<RecordingFile>();
  const int64_t now = NowNanoseconds();
  KHVD_RETURN_IF_ERROR(file->Open(path, job_->size(), now));
  {
    std::lock_guard<std::mutex> written(written_);
    recording_file_ = std::move(file);
    recording_ = std::make_unique<Recording>(recording_file_.get(), job_.get(), now);
    skipped_before_ = skipped_requests_.load();
  }
  const Status begun = Begin();
  if (!begun.ok()) CloseRecording();
  return begun;
}

void Timeline::StopAll() {
  Stop();
  std::lock_guard<std::mutex> lock(control_);
  if (recording_ == nullptr) return;
  End();
  CloseRecording();
}

void Timeline::CloseRecording() {
  recording_->Close();
  recording_.reset();
  recording_file_.reset();
}

// Makes the driving thread record, unless it does already.
Status Timeline::Begin() {
  if (on()) return Status::Ok();
  if (ring_ == nullptr) ring_ = std::make_unique<TimelineRing>(kRingRecords);
  started_.store(NowNanoseconds());
  written_session_ = ++sessions_;
  stop_ = false;
  session_.store(sessions_, std::memory_order_release);
  job_->set_timeline_on(true);
  try {
    thread_ = StartThread("keras_hvd_trace", [this] { WriteUntilStopped(); });
  } catch (const std::exception& error) {
    job_->set_timeline_on(false);
    session_.store(0);
    return StatusOf(error);
  }
  return Status::Ok();
}

// All records have been written when this returns.
void Timeline::End() {
  job_->set_timeline_on(false);
  session_.store(0);
  AwaitGpu();
  {
    std::lock_guard<std::mutex> stop_lock(stop_mutex_);
    stop_ = true;
  }
  stop_changed_.notify_one();
  thread_.join();
}

// No recorded batch begins any more. The driving thread checks the GPU and must be
// awake for it.
void Timeline::AwaitGpu() {
  const Clock::time_point deadline = Clock::now() + kPatienceForGpu;
  std::unique_lock<std::mutex> lock(on_gpu_mutex_);
  while (on_gpu_ > 0 && Clock::now() < deadline) {
    job_->RingLeader();
    on_gpu_changed_.wait_for(lock, kBetweenRings);
  }
}

// ---- Notes of the driving thread

// Whether records may be added. If not, none are until there is plenty of room again:
// one long gap is better than many short ones.
bool Timeline::HasRoom(size_t records) {
  const uint32_t session = session_.load(std::memory_order_relaxed);
  if (session != driven_session_) {
    driven_session_ = session;
    recorded_from_ = started_.load();
    to_begin_.clear();
    reported_stalls_.clear();
  }
  const bool was_paused = std::exchange(paused_, false);
  const size_t needed = records + kRoomForPhases;
  paused_ =
      ring_->room() < (was_paused ? std::max(needed, ring_->capacity() / 2) : needed);
  if (paused_ == was_paused) return !paused_;
  if (was_paused) recorded_from_ = NowNanoseconds();
  job_->set_timeline_paused(paused_);
  return !paused_;
}

TimelineRecord& Timeline::Add(TimelineRecord::Type type, uint64_t batch) {
  TimelineRecord& record = ring_->Add();
  record.type = type;
  record.session = driven_session_;
  record.batch = batch;
  return record;
}

void Timeline::AddDecision(uint64_t batch, const Decision& decision, bool runs_here) {
  const std::vector<Decision::Request>& requests = decision.requests;
  if (!on()) return;
  if (requests.size() < decision.tensors.size()) {
    // It was paused, or not yet on, when these were matched.
    if (paused_) skipped_requests_ += static_cast<int64_t>(decision.tensors.size());
    return;
  }
  size_t records = 1;
  double first = 1e300;
  for (const Decision::Request& request : requests) {
    records += 2 + request.since.size() / TimelineRecord::kTimes;
    for (const auto& [rank, since] : request.since) first = std::min(first, since);
  }
  const bool has_room = HasRoom(records);
  const int64_t from = FromSeconds(first);
  // Submitted before the timeline was on.
  if (from < started_.load()) return;
  if (!has_room || from < recorded_from_) {
    skipped_requests_ += static_cast<int64_t>(requests.size());
    return;
  }
  TimelineRecord& record = Add(TimelineRecord::Type::kDecision, batch);
  record.number = runs_here ? 1 : 0;
  record.times[0] = NowNanoseconds();
  for (const Decision::Request& request : requests) AddRequest(batch, request);
  ring_->Publish();
  if (runs_here) to_begin_.push_back(batch);
}

void Timeline::AddRequest(uint64_t batch, const Decision::Request& request) {
  const std::vector<std::pair<int, double>>& since = request.since;
  for (size_t begin = 0; begin < since.size(); begin += TimelineRecord::kTimes) {
    TimelineRecord& record = Add(TimelineRecord::Type::kArrivals, batch);
    record.number = static_cast<int32_t>(
        std::min<size_t>(since.size() - begin, TimelineRecord::kTimes));
    for (int i = 0; i < record.number; ++i) {
      record.ranks[i] = since[begin + i].first;
      record.times[i] = FromSeconds(since[begin + i].second);
    }
  }
  Add(TimelineRecord::Type::kRequest, batch).description = request.description;
}

void Timeline::AddCycle() {
  if (!on() || !mark_cycles_.load(std::memory_order_relaxed) || !HasRoom(1)) return;
  Add(TimelineRecord::Type::kCycle, 0).times[0] = NowNanoseconds();
  ring_->Publish();
}

void Timeline::AddStalls(const std::vector<Stall>& stalls, double now) {
  if (!on()) return;
  if (stalls.empty()) reported_stalls_.clear();
  for (const Stall& stall : stalls) {
    if (now - stall.since < kLongWait || !HasRoom(stall.missing.size())) continue;
    const auto [known, is_new] = reported_stalls_.try_emplace(stall.key, stall.since);
    if (!is_new && known->second == stall.since) continue;
    known->second = stall.since;
    const auto description = std::make_shared<Description>();
    description->process_set = stall.key.process_set;
    description->name = stall.key.name;
    for (const int rank : stall.missing) {
      TimelineRecord& record = Add(TimelineRecord::Type::kMissing, 0);
      record.number = rank;
      record.times[0] = FromSeconds(stall.since);
      record.times[1] = FromSeconds(now);
      record.description = description;
    }
    ring_->Publish();
  }
}

void Timeline::AddBatchElsewhere(const BatchElsewhere& batch) {
  const bool is_kind = batch.kind >= 0 && batch.kind < kKinds;
  if (!on() || !is_kind || !HasRoom(1)) return;
  const int64_t begin = Nanoseconds(batch.begin.time_since_epoch());
  if (begin < recorded_from_) return;
  const auto description = std::make_shared<Description>();
  description->kind = static_cast<Kind>(batch.kind);
  description->name = batch.name;
  TimelineRecord& record = Add(TimelineRecord::Type::kBatchElsewhere, 0);
  record.number = batch.rank;
  record.ranks[0] = batch.requests;
  record.times[0] = begin;
  record.times[1] = Nanoseconds(batch.end.time_since_epoch());
  record.description = description;
  ring_->Publish();
}

PhaseRecorder* Timeline::BeginBatch(uint64_t batch) {
  if (!on() || session_.load() != driven_session_) return nullptr;
  while (!to_begin_.empty() && to_begin_.front() < batch) to_begin_.pop_front();
  if (to_begin_.empty() || to_begin_.front() != batch) return nullptr;
  to_begin_.pop_front();
  // A batch needs two records, with its end.
  if (ring_->room() < 2) {
    skipped_requests_ += 1;
    return nullptr;
  }
  running_ = batch;
  running_since_ = NowNanoseconds();
  phase_ = CollectivePhase::kNone;
  phase_begin_ = 0;
  phase_end_ = INT64_MAX;
  Add(TimelineRecord::Type::kBegin, batch).times[0] = running_since_;
  ring_->Publish();
  return this;
}

void Timeline::Enter(CollectivePhase phase, int64_t begin, int64_t end) {
  const int64_t now = NowNanoseconds();
  EndPhase(now);
  phase_ = phase;
  // After the beginning of the batch, so that viewers show the nesting.
  phase_since_ = std::max(now, running_since_ + 1);
  if (phase == CollectivePhase::kWait || phase == CollectivePhase::kExchange) return;
  phase_begin_ = begin;
  phase_end_ = end;
}

void Timeline::EndPhase(int64_t now) {
  if (phase_ == CollectivePhase::kNone) return;
  if (ring_->room() < 2) {
    skipped_phases_ += 1;
    return;
  }
  TimelineRecord& record = Add(TimelineRecord::Type::kPhase, running_);
  record.number = static_cast<int32_t>(phase_);
  record.times[0] = phase_since_;
  record.times[1] = std::max(now, phase_since_);
  record.times[2] = phase_begin_;
  record.times[3] = phase_end_;
  ring_->Publish();
}

void Timeline::EndBatch(bool ok) {
  const int64_t now = std::max(NowNanoseconds(), running_since_ + 1);
  EndPhase(now);
  phase_ = CollectivePhase::kNone;
  TimelineRecord& record = Add(TimelineRecord::Type::kEnd, running_);
  record.number = ok ? 1 : 0;
  record.times[0] = now;
  ring_->Publish();
}

TimelineRecord Timeline::BeginOnGpu() {
  TimelineRecord record;
  record.type = TimelineRecord::Type::kGpuPhase;
  record.session = driven_session_;
  record.batch = running_;
  std::lock_guard<std::mutex> lock(on_gpu_mutex_);
  on_gpu_ += 1;
  return record;
}

void Timeline::EndOnGpu() {
  std::lock_guard<std::mutex> lock(on_gpu_mutex_);
  on_gpu_ -= 1;
  if (on_gpu_ == 0) on_gpu_changed_.notify_all();
}

// Room is left for the end of a running batch.
void Timeline::AddOnGpu(const TimelineRecord& phase) {
  if (ring_->room() < 2) return SkipOnGpu(phase);
  ring_->Add() = phase;
  ring_->Publish();
}

void Timeline::SkipOnGpu(const TimelineRecord& phase) {
  if (phase.session == driven_session_) skipped_phases_ += 1;
}

// ---- The writing thread

void Timeline::WriteUntilStopped() {
  // All other work on the cores comes first.
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kLeastPriority);
  std::unique_lock<std::mutex> lock(stop_mutex_);
  while (!stop_) {
    stop_changed_.wait_for(lock, kPeriod, [this] { return stop_; });
    lock.unlock();
    {
      std::lock_guard<std::mutex> written(written_);
      Drain(false);
    }
    lock.lock();
  }
  lock.unlock();
  std::lock_guard<std::mutex> written(written_);
  Drain(true);
}

void Timeline::Drain(bool all) {
  const int64_t until = Nanoseconds(CLOCK_THREAD_CPUTIME_ID) + kComputingNanoseconds;
  int records = 0;
  while (TimelineRecord* record = ring_->Front()) {
    // Drops the records of a batch that ends after the stop.
    if (record->session == written_session_) Pass(*record);
    record->description.reset();
    ring_->Remove();
    const bool look = ++records % kBetweenLooks == 0;
    if (look && !all && Nanoseconds(CLOCK_THREAD_CPUTIME_ID) > until) break;
  }
  Flush();
}

void Timeline::Pass(const TimelineRecord& record) {
  if (writer_ != nullptr) writer_->Add(record);
  if (recording_ != nullptr) recording_->Add(record);
}

void Timeline::Flush() {
  if (recording_ != nullptr) {
    const int64_t now = NowNanoseconds();
    const bool has_all = ring_->Front() == nullptr;
    recording_->Flush(now, has_all, skipped_requests_.load() - skipped_before_);
  }
  if (file_ == nullptr) return;
  AddSkipped();
  file_->Flush();
  if (file_->failure().ok() || std::exchange(said_failure_, true)) return;
  Log(0, LogLevel::kWarning, file_->failure().message);
}

void Timeline::AddSkipped() {
  const int64_t requests = skipped_requests_.load();
  const int64_t phases = skipped_phases_.load();
  if (requests == noted_requests_ && phases == noted_phases_) return;
  writer_->AddSkipped(NowNanoseconds(), requests - noted_requests_,
                      phases - noted_phases_);
  noted_requests_ = requests;
  noted_phases_ = phases;
}

}  // namespace keras_hvd
