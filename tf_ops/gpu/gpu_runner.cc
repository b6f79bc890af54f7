#include "tf_ops/gpu/gpu_runner.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <initializer_list>

#include "tf_ops/operation/log.h"
#include "tf_ops/transport/threads.h"

namespace keras_hvd {
namespace {

// This many ends of work under way are looked for at a time, where there may be many:
// asking the driver takes microseconds.
constexpr size_t kEndsTogether = 16;

// How often work under way is checked.
constexpr std::chrono::milliseconds kInterval(100);

// How long a stream may take to drain after an abort.
constexpr std::chrono::seconds kAbortPatience(1);

// Work enqueued already has to be given up in any case.
template <typename Step>
Status WithoutRaising(const Step& step) {
  try {
    return step();
  } catch (const std::exception& error) {
    return StatusOf(error);
  }
}

}  // namespace

GpuRunner::GpuRunner(double warning_seconds, double abort_seconds,
                     std::shared_ptr<JobState> job, std::shared_ptr<GpuAccess> access,
                     Waiter* waiter, Timeline* timeline)
    : rank_(job->rank()),
      warning_seconds_(warning_seconds),
      abort_seconds_(abort_seconds),
      job_(std::move(job)),
      access_(std::move(access)),
      waiter_(*waiter),
      timeline_(*timeline),
      communicators_(
          job_, access_, [this](int64_t polls) { return KeepWaiting(polls); },
          [this](const nccl::AbortCall& abort) { GiveUpCall(abort); },
          [this] { SayStuck(); }) {}

GpuRunner::~GpuRunner() { Abort(); }

// ---- Batches

bool GpuRunner::Run(const Batch& batch, const std::vector<int>& members,
                    HostCollectives* host, bool recorded) {
  if (gpu_ == nullptr && !Succeeded(access_->Open(&gpu_))) return false;
  const cuda::Gpu::Current current(*gpu_);
  GpuBatch on_gpu = BatchOf(batch, members, host);
  waits_for_ = Title(*batch.front()->description);
  waits_for_members_ = members;
  // Otherwise NCCL would take whatever GPU is current.
  if (!Succeeded(current.status())) return false;
  if (recorded) {
    on_gpu.times =
        std::make_unique<GpuTimes>(&timeline_, batch, gpu_, clock_.Reference(gpu_));
  }
  if (Succeeded(WithoutRaising([&] { return Enqueue(&on_gpu); }))) return true;
  GiveUp(&on_gpu);
  return false;
}

GpuBatch GpuRunner::BatchOf(const Batch& batch, const std::vector<int>& members,
                            HostCollectives* host) {
  return GpuBatch(batch, members, IndexOf(members, rank_), gpu_, host, &staging_,
                  [this](int64_t polls) { return KeepWaiting(polls); });
}

Status GpuRunner::Enqueue(GpuBatch* batch) {
  batch->stream = StreamFor(*batch);
  Status status = ContinueOn(batch->stream);
  if (status.ok()) status = AwaitInputs(batch);
  if (status.ok()) status = Move(batch);
  if (status.ok()) status = End(batch);
  if (!status.ok() || !batch->host.compares()) return status;
  KHVD_RETURN_IF_ERROR(CompareThroughHost(batch));
  for (cuda::Memory& memory : batch->GiveMemory()) {
    staging_.GiveBack(std::move(memory));
  }
  return status;
}

// From one stream to another and back the GPU takes as long as for a small collective.
// If the caller drives, and makes its stream wait for the results, the batch can run on
// that stream: nothing else can have come there since the request. Timelines and
// comparisons are of the collectives' stream.
cuda::Stream GpuRunner::StreamFor(const GpuBatch& batch) const {
  const cuda::Stream usual = gpu_->stream();
  if (batch.operations.size() != 1 || batch.times != nullptr || batch.host.compares()) {
    return usual;
  }
  const Operation& operation = *batch.operations.front();
  const StreamPoint* const point = operation.stream_point.get();
  if (point == nullptr || point->end != nullptr || point->stream == nullptr ||
      operation.ending == nullptr || !operation.ending->CallerDrives() ||
      HasOwnRows(operation.description->kind)) {
    return usual;
  }
  const NcclBackend* const nccl =
      communicators_.Find(operation.description->process_set);
  return nccl != nullptr && nccl->CanRun(operation) ? point->stream : usual;
}

// Batches run in the order in which they are enqueued, whatever their streams are.
Status GpuRunner::ContinueOn(cuda::Stream stream) {
  if (std::exchange(last_stream_, stream) == stream || under_way_.empty()) {
    return Status::Ok();
  }
  return under_way_.back().end->MakeWait(stream);
}

// Nothing enqueued from now on runs before the inputs are there.
Status GpuRunner::AwaitInputs(GpuBatch* batch) {
  const GpuSpan span(batch->times.get(), GpuPhase::kWaitForInputs);
  for (const auto& operation : batch->operations) {
    const StreamPoint* const point = operation->stream_point.get();
    if (point != nullptr && point->stream == batch->stream) continue;
    KHVD_RETURN_IF_ERROR(point == nullptr ? GiveZeros(operation.get(), batch)
                                          : point->ready->MakeWait(batch->stream));
  }
  return Status::Ok();
}

// This rank has joined and takes part with zeros, which the results replace.
Status GpuRunner::GiveZeros(Operation* operation, GpuBatch* batch) {
  for (const TensorDescription& tensor : operation->description->tensors) {
    const int64_t bytes = Elements(tensor) * Bytes(tensor.dtype);
    char* zeros = nullptr;
    Status status = batch->TakeMemory(cuda::Memory::Space::kDevice, bytes, &zeros);
    if (status.ok() && bytes > 0) status = gpu_->SetZero(zeros, bytes);
    if (!status.ok()) return status;
    operation->buffers.push_back({zeros, zeros});
  }
  return Status::Ok();
}

// Each operation goes to the first of these that can run it:
//   one rank      where the set has no other, and nothing is scaled
//   NCCL          where all members can use it, and it reduces as the CPU would
//   host staging  everything else
Status GpuRunner::Move(GpuBatch* batch) {
  const bool alone = batch->members.size() == 1;
  NcclBackend* nccl = nullptr;
  Status status = alone ? Status::Ok() : communicators_.Open(batch, &nccl);
  std::vector<Operation*> left;
  for (const auto& operation : batch->operations) left.push_back(operation.get());
  for (GpuBackend* const backend : std::initializer_list<GpuBackend*>{
           alone ? &one_rank_ : nullptr, nccl, &host_staging_}) {
    if (!status.ok()) break;
    if (backend == nullptr) continue;
    const auto taken = std::stable_partition(
        left.begin(), left.end(),
        [&](const Operation* operation) { return !backend->CanRun(*operation); });
    if (taken != left.end()) status = backend->Run({taken, left.end()}, batch);
    left.erase(taken, left.end());
  }
  if (!status.ok() || left.empty()) return status;
  return Status::Internal(Title(*left.front()->description) + " has no backend");
}

Status GpuRunner::End(GpuBatch* batch) {
  std::shared_ptr<const SharedEvent> end;
  KHVD_RETURN_IF_ERROR(RecordOn(gpu_, batch->stream, &end));
  for (const auto& operation : batch->operations) {
    const StreamPoint* const point = operation->stream_point.get();
    if (point == nullptr) continue;
    // Nobody asks for the mark of a failed operation, but its input is still sent.
    if (point->end != nullptr && !operation->out_of_memory) {
      *point->end = new EndMark{end};
      continue;
    }
    if (point->stream == batch->stream) continue;
    KHVD_RETURN_IF_ERROR(end->MakeWait(point->stream));
  }
  under_way_.push_back({end, waits_for_, batch->members, CurrentDecision(),
                        Clock::now(), batch->GiveMemory(), std::move(batch->times)});
  // Soon enough that the next batches need no new events.
  if (under_way_.size() % kEndsTogether == 0) ForgetEnded(kEndsTogether);
  return Status::Ok();
}

// The requests end, and their callers reuse the buffers. That must come after the work
// already enqueued with them.
void GpuRunner::GiveUp(GpuBatch* batch) {
  // The streams would wait for a member that has died.
  AbortCommunicators();
  std::shared_ptr<const SharedEvent> end;
  const bool recorded = RecordOn(gpu_, gpu_->stream(), &end).ok();
  for (const auto& operation : batch->operations) {
    const StreamPoint* const point = operation->stream_point.get();
    if (point == nullptr) continue;
    if (point->end != nullptr) {
      delete static_cast<EndMark*>(std::exchange(*point->end, nullptr));
    }
    // A stream that cannot be made to wait runs nothing any more.
    if (recorded) static_cast<void>(end->MakeWait(point->stream));
  }
  // Freeing memory waits for the GPU. So the memory goes back to code that knows
  // whether the GPU still uses it. If none will know, it stays until the process ends.
  std::vector<cuda::Memory> memory = batch->GiveMemory();
  if (recorded) {
    under_way_.push_back({end, waits_for_, batch->members, CurrentDecision(),
                          Clock::now(), std::move(memory), nullptr});
  } else {
    for (cuda::Memory& each : memory) each.Abandon();
  }
  Abort();
}

// This thread's call of NCCL does not return: called on another one in its place.
void GpuRunner::GiveUpCall(const nccl::AbortCall& abort) {
  const cuda::Gpu::Current current(*gpu_);
  static_cast<void>(Succeeded(GivenUp()));
  before_abort_();
  job_->AwaitAllKnow();
  abort();
}

void GpuRunner::SayStuck() {
  Log(rank_, LogLevel::kError,
      job_->Describe(rank_) + " is stuck in NCCL, in " + waits_for_ +
          ", which does not return although it was aborted. The process may have to be "
          "killed: kill -9 " +
          std::to_string(getpid()));
}

// ---- Process sets

bool GpuRunner::AddProcessSet(int32_t id, const std::vector<int>& members,
                              const std::vector<int>& all, HostCollectives* host) {
  // Either all ranks have a communicator or none has. A rank alone needs none.
  if (gpu_ == nullptr || !communicators_.IsOpen(0) || members.size() == 1) return true;
  const cuda::Gpu::Current current(*gpu_);
  waits_for_ = "the communicator of process set " + std::to_string(id);
  // A split involves all ranks.
  waits_for_members_ = all;
  if (!Succeeded(current.status())) return false;
  // NCCL can split only a communicator with nothing under way.
  if (!AwaitUnderWay()) return false;
  const Batch nothing;
  GpuBatch batch = BatchOf(nothing, all, host);
  const Status status = WithoutRaising([&] {
    Status added = ContinueOn(batch.stream);
    if (added.ok()) added = communicators_.Add(id, members, &batch);
    return added.ok() ? End(&batch) : added;
  });
  if (Succeeded(status)) return true;
  GiveUp(&batch);
  return false;
}

bool GpuRunner::RemoveProcessSet(int32_t id) {
  if (gpu_ == nullptr) return true;
  const cuda::Gpu::Current current(*gpu_);
  waits_for_ = "the end of process set " + std::to_string(id);
  waits_for_members_.clear();
  return Succeeded(current.status()) && Succeeded(communicators_.Remove(id));
}

// ---- Work under way

void GpuRunner::Check() {
  if (under_way_.empty() || Clock::now() < next_check_) return;
  next_check_ = Clock::now() + kInterval;
  const cuda::Gpu::Current current(*gpu_);
  CheckUnderWay();
}

// Their order is the stream's, so all work before an end that has passed has ended too.
// Returns false after an error.
bool GpuRunner::ForgetEnded(size_t together) {
  while (under_way_.size() >= together) {
    bool passed = false;
    const UnderWay& last = under_way_[together - 1];
    if (!Succeeded(last.end->Query(&passed), last.title)) return false;
    if (!passed) break;
    for (size_t i = 0; i < together; ++i) ForgetFirst();
  }
  return true;
}

void GpuRunner::ForgetFirst() {
  UnderWay& first = under_way_.front();
  if (first.times != nullptr) {
    first.times->Write();
    clock_.Renew(gpu_);
  }
  for (cuda::Memory& memory : first.memory) staging_.GiveBack(std::move(memory));
  under_way_.pop_front();
}

void GpuRunner::CheckUnderWay() {
  if (!ForgetEnded(kEndsTogether) || !ForgetEnded(1)) return;
  const std::string& oldest =
      under_way_.empty() ? waits_for_ : under_way_.front().title;
  if (!Succeeded(communicators_.AsyncError(), oldest) || under_way_.empty()) return;
  const UnderWay& first = under_way_.front();
  if (!CheckMembers(first.members, first.decision, first.title)) return;
  CheckAge(first.title, first.since);
}

// The number of the decision being carried out, the same on all ranks.
uint64_t GpuRunner::CurrentDecision() const { return job_->CarriedOut(rank_) + 1; }

// A member that leaves does not carry out later decisions, and the others' GPUs would
// wait for it forever. Returns whether all members reached this decision or still may.
bool GpuRunner::CheckMembers(const std::vector<int>& members, uint64_t decision,
                             const std::string& title) {
  for (const int member : members) {
    if (!job_->HasLeftBefore(member, decision)) continue;
    job_->Fail(Code::kRankFailed,
               job_->Describe(member) + " left the job in the middle of " + title);
    return false;
  }
  return true;
}

void GpuRunner::CheckAge(const std::string& title, Clock::time_point since) {
  const double age = Seconds(Clock::now() - since);
  const bool aborts = abort_seconds_ > 0 && age >= abort_seconds_;
  if (!aborts && (warning_seconds_ < 0 || age < warning_seconds_)) return;
  const std::string text =
      title + " has not ended on the GPU of " + job_->Describe(rank_) + " for " +
      std::to_string(static_cast<int>(age)) + " s. NCCL_DEBUG=INFO says what NCCL does";
  if (aborts) {
    job_->Fail(Code::kRankFailed,
               text + ". The job was ended by KERAS_HVD_STALL_ABORT_SECONDS");
    return;
  }
  if (std::exchange(warned_of_, title) != title) {
    Log(rank_, LogLevel::kWarning, text);
  }
}

void GpuRunner::Leave() {
  if (gpu_ == nullptr) return;
  const cuda::Gpu::Current current(*gpu_);
  waits_for_ = "the end of the GPU's collectives";
  waits_for_members_.clear();
  if (!AwaitUnderWay() || !communicators_.Finalize().ok()) Abort();
  staging_.Clear();
  clock_.Clear();
}

// If this were given up, the other members would wait for this rank forever.
bool GpuRunner::AwaitUnderWay() {
  bool goes_on = true;
  for (int64_t polls = 0; goes_on && !under_way_.empty(); ++polls) {
    goes_on = KeepWaiting(polls);
    if (goes_on) CheckUnderWay();
  }
  return goes_on || Succeeded(GivenUp(), under_way_.front().title);
}

// After this the GPU computes garbage, which nobody may take for a result.
void GpuRunner::AbortCommunicators() {
  if (communicators_.any_open() && job_->Failed()) {
    before_abort_();
    job_->AwaitAllKnow();
  }
  communicators_.Abort();
}

void GpuRunner::Abort() {
  if (gpu_ == nullptr) return;
  const cuda::Gpu::Current current(*gpu_);
  AbortCommunicators();
  // Work under way may still use its memory.
  const Clock::time_point deadline = Clock::now() + kAbortPatience;
  bool uses_memory = !under_way_.empty();
  while (uses_memory && Clock::now() < deadline) {
    bool passed = false;
    // After an error nothing runs any more.
    const bool ok = under_way_.back().end->Query(&passed).ok();
    uses_memory = ok && !passed;
    sched_yield();
  }
  if (uses_memory) {
    // Freeing memory waits for the GPU, which may hang. The process's end frees it.
    for (UnderWay& each : under_way_) {
      for (cuda::Memory& memory : each.memory) memory.Abandon();
    }
    staging_.Abandon();
  }
  under_way_.clear();
  staging_.Clear();
  clock_.Clear();
}

// ---- Both

bool GpuRunner::KeepWaiting(int64_t polls) {
  if (polls == 0) waiting_since_ = Clock::now();
  if (!CheckMembers(waits_for_members_, CurrentDecision(), waits_for_)) return false;
  CheckAge(waits_for_, waiting_since_);
  return waiter_.Pause(polls);
}

// Returns whether the status is OK; if not, the job has failed.
bool GpuRunner::Succeeded(const Status& status, const std::string& title) {
  if (status.ok()) return true;
  if (job_->Failed()) return false;
  const std::string rank = job_->Describe(rank_);
  if (status.code == Code::kRankFailed) {
    // It is shutting down, and has waited long enough.
    job_->Fail(Code::kRankFailed, rank + " left the job in the middle of " + title);
    return false;
  }
  std::string text = rank + ": " + status.message;
  if (!title.empty()) text = title + " failed on " + text;
  job_->Fail(Code::kInternal, text);
  return false;
}

}  // namespace keras_hvd
