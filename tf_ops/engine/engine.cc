#include "tf_ops/engine/engine.h"

#include <functional>
#include <thread>
#include <utility>

namespace keras_hvd {
namespace {

// Up to this size a collective takes less time than handing it to another thread.
constexpr int64_t kSmallBytes = 64 << 10;

// The name of all changes, which must come in the same order on all ranks.
constexpr char kProcessSets[] = "keras_hvd.process_sets";

void NoteEnd(Pending* pending, Operation* operation) {
  operation->done = [pending](const Status& status) {
    std::lock_guard<std::mutex> lock(pending->mutex);
    pending->status = status;
    pending->ended.store(true);
    // Under the lock: the waiting thread destroys the variable as soon as it can.
    pending->changed.notify_one();
  };
}

}  // namespace

Status Pending::Await() {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [this] { return ended.load(); });
  return status;
}

Engine::Engine(EngineOptions options, const World& world)
    : is_coordinator_(world.job->is_coordinator()),
      size_(world.job->size()),
      timeline_(world.job),
      gpu_(std::make_shared<GpuAccess>(options.gpu_libraries, options.local_rank)),
      known_descriptions_(options.cache_capacity),
      requests_(world, options, &counters_),
      loop_(options, world, gpu_, &requests_, &timeline_, &counters_) {}

Engine::~Engine() { Stop(); }

void Engine::Stop() {
  loop_.Stop();
  timeline_.StopAll();
}

Status Engine::StartTimeline(const std::string& path, bool mark_cycles) {
  return is_coordinator_ ? timeline_.Start(path, mark_cycles) : Status::Ok();
}

Status Engine::StartRecording(const std::string& path) {
  return is_coordinator_ ? timeline_.StartRecording(path) : Status::Ok();
}

void Engine::StopTimeline() { timeline_.Stop(); }

// ---- Requests

Status Engine::Submit(std::unique_ptr<Operation> operation) {
  const Status submitted = requests_.Submit(std::move(operation));
  if (submitted.ok()) loop_.Ring();
  return submitted;
}

Status Engine::SetStreamPoint(cuda::Stream stream, void** end, Operation* operation) {
  auto point = std::make_unique<StreamPoint>();
  KHVD_RETURN_IF_ERROR(gpu_->OpenFor(stream, &point->gpu));
  KHVD_RETURN_IF_ERROR(RecordOn(point->gpu, stream, &point->ready));
  point->stream = stream;
  point->end = end;
  if (end != nullptr) *end = nullptr;
  operation->stream_point = std::move(point);
  return Status::Ok();
}

Status Engine::SubmitAndDrive(std::unique_ptr<Operation> operation) {
  // If others are under way, the next one to run may take long.
  const bool alone = !requests_.any_pending();
  // A GPU's work is only enqueued.
  const bool short_work =
      operation->stream_point != nullptr || operation->input_bytes() <= kSmallBytes;
  if (!alone || !short_work) return Submit(std::move(operation));
  const auto ending = std::make_shared<Ending>();
  ending->caller.store(std::this_thread::get_id());
  operation->ending = ending;
  const std::function<void(const Status&)> done = operation->done;
  KHVD_RETURN_IF_ERROR(requests_.Submit(std::move(operation)));
  loop_.DriveIfFree(ending->ended);
  ending->caller.store({});
  if (ending->claimed.exchange(true)) done(ending->status);
  return Status::Ok();
}

Status Engine::Run(std::unique_ptr<Operation> operation) {
  Pending pending;
  NoteEnd(&pending, operation.get());
  KHVD_RETURN_IF_ERROR(requests_.Submit(std::move(operation)));
  loop_.DriveSoon(pending.ended);
  return pending.Await();
}

Status Engine::Begin(std::unique_ptr<Operation> operation, Pending* pending) {
  NoteEnd(pending, operation.get());
  return Submit(std::move(operation));
}

void Engine::DriveUntil(const std::atomic<bool>& ended) {
  if (!ended.load()) loop_.DriveSoon(ended);
}

// ---- Agreements

Status Engine::AddProcessSet(const std::vector<int>& ranks, int32_t* id) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    const bool ascending = i == 0 || ranks[i] > ranks[i - 1];
    if (ascending && ranks[i] >= 0 && ranks[i] < size_) continue;
    return Status::InvalidArgument("a process set has ranks of 0.." +
                                   std::to_string(size_ - 1) + ", ascending; got " +
                                   RankList(ranks));
  }
  if (ranks.empty()) return Status::InvalidArgument("a process set needs a rank");
  Description description;
  description.kind = Kind::kAddProcessSet;
  description.name = kProcessSets;
  description.members = ranks;
  description.last_earlier_set = requests_.process_sets().last_earlier();
  return Agree(std::move(description), id);
}

Status Engine::RemoveProcessSet(int32_t id) {
  Description description;
  description.kind = Kind::kRemoveProcessSet;
  description.name = kProcessSets;
  KHVD_RETURN_IF_ERROR(MembersOf(id, &description.members));
  if (id == 0) {
    return Status::InvalidArgument("process set 0, of all ranks, cannot be removed");
  }
  return Agree(std::move(description), nullptr);
}

Status Engine::Join(int32_t* last) {
  Description description;
  description.kind = Kind::kJoin;
  description.name = kJoinName;
  return Agree(std::move(description), last);
}

Status Engine::MembersOf(int32_t process_set, std::vector<int>* ranks) {
  return requests_.MembersOf(process_set, ranks);
}

Status Engine::Agree(Description description, int32_t* answer) {
  auto operation = std::make_unique<Operation>();
  operation->description = std::make_shared<Description>(std::move(description));
  operation->answer = answer;
  return Run(std::move(operation));
}

}  // namespace keras_hvd
