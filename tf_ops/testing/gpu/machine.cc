#include "tf_ops/testing/gpu/machine.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace keras_hvd::stand_in {
namespace {

constexpr int kMaxDevices = 64;
// An event that has been asked for this often is not delayed any more.
constexpr int kPatience = 6;
// Memory given back that stays there, so that its late users are found.
constexpr size_t kQuarantine = 64 << 20;
constexpr size_t kAlignment = 256;

// The state of the calling thread.
struct ThreadState {
  uint64_t generation = 0;
  int rank = -1;
  Call* last_call = nullptr;
  std::vector<cuda::Context> contexts;
};
thread_local ThreadState this_thread;

uint64_t Environment(const char* name, uint64_t otherwise) {
  const char* const value = getenv(name);
  return value == nullptr ? otherwise : strtoull(value, nullptr, 10);
}

void Poison([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_POISON_MEMORY_REGION(memory, bytes);
#endif
}
void Unpoison([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
#endif
}

class Kernel : public Item {
 public:
  explicit Kernel(std::function<void()> body) : body_(std::move(body)) {}
  std::string text() const override { return "a kernel"; }
  void Start() override {
    body_();
    body_ = nullptr;
  }

 private:
  std::function<void()> body_;
};

void Include(int member, bool on, std::set<int>* members) {
  if (on) {
    members->insert(member);
  } else {
    members->erase(member);
  }
}

}  // namespace

Machine& Machine::Get() {
  static Machine* const machine = new Machine();  // streams' threads outlive all else
  return *machine;
}

Machine::Machine()
    : random_(Environment("KERAS_HVD_STAND_IN_SEED", 1)),
      devices_(static_cast<int>(Environment("KERAS_HVD_STAND_IN_DEVICES", 4))),
      nccl_version_(static_cast<int>(
          Environment("KERAS_HVD_STAND_IN_NCCL_VERSION", kNcclVersion))),
      compute_capabilities_(kMaxDevices, static_cast<int>(Environment(
                                             "KERAS_HVD_STAND_IN_COMPUTE_CAPABILITY",
                                             kComputeCapability))),
      unified_(Environment("KERAS_HVD_STAND_IN_UNIFIED", 0) != 0),
      contexts_(kMaxDevices) {
  for (int device = 0; device < kMaxDevices; ++device) {
    contexts_[device].device = device;
  }
}

// ---- Control

void Machine::Reset(uint64_t seed, int devices) {
  Lock lock(*this);
  EndStreams(&lock);
  reset_nccl();
  streams_.clear();
  stream_handles_.clear();
  events_.clear();
  event_handles_.clear();
  for (cuda::ContextState& context : contexts_) {
    context.retained = 0;
    context.default_stream = nullptr;
  }
  for (auto& [data, allocation] : allocations_) {
    Unpoison(allocation.data, allocation.bytes);
    free(allocation.data);
  }
  allocations_.clear();
  quarantine_.clear();
  quarantined_ = 0;
  held_members_.clear();
  held_progress_.clear();
  queue_limit_ = 0;
  abort_delay_ = {};
  calls_.clear();
  injections_.clear();
  violations_.clear();
  sticky_error = 0;
  random_.seed(seed);
  devices_ = devices;
  nccl_version_ = kNcclVersion;
  compute_capabilities_.assign(kMaxDevices, kComputeCapability);
  generation_ += 1;
}

void Machine::EndStreams(Lock* lock) {
  for (cuda::StreamState& stream : streams_) {
    stream.leaving = true;
    stream.wake.notify_all();
  }
  lock->Await(changed_, [this] {
    return std::none_of(
        streams_.begin(), streams_.end(),
        [](const cuda::StreamState& stream) { return stream.has_thread; });
  });
}

void Machine::SetDevices(int devices) {
  Lock lock(*this);
  devices_ = devices;
}

void Machine::SetNcclVersion(int version) {
  Lock lock(*this);
  nccl_version_ = version;
}

void Machine::SetComputeCapability(int device, int capability) {
  Lock lock(*this);
  compute_capabilities_[device] = capability;
}

void Machine::Inject(const Injection& injection) {
  Lock lock(*this);
  injections_.push_back({injection, 0});
}

void Machine::SetRank(int rank) { this_thread.rank = rank; }

void Machine::Enqueue(cuda::Stream stream, std::function<void()> kernel) {
  auto item = std::make_unique<Kernel>(std::move(kernel));
  Lock lock(*this);
  const std::vector<cuda::Context>& contexts = contexts_of_thread();
  const cuda::Stream resolved =
      Resolve(stream, contexts.empty() ? nullptr : contexts.back());
  if (resolved == nullptr) {
    Violate("a kernel is put on a stream that is not there");
    lock.Without([&] { item.reset(); });
    return;
  }
  Put(resolved, std::move(item));
}

std::string Machine::Synchronize(cuda::Stream stream, std::chrono::milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  Lock lock(*this);
  const std::vector<cuda::Context>& contexts = contexts_of_thread();
  stream = Resolve(stream, contexts.empty() ? nullptr : contexts.back());
  if (stream == nullptr) return "no such stream";
  const uint64_t last = stream->last;
  std::string stuck;
  const bool in_time = lock.AwaitUntil(changed_, end, [&] {
    if (stream->done >= last) return true;
    int polls = kPatience;
    Demand({stream, last}, &polls);
    stuck = StuckText();
    return !stuck.empty();
  });
  if (!stuck.empty()) return stuck;
  if (!in_time) {
    return "stream " + std::to_string(stream->id) + " does not get beyond " +
           stream->queue.front()->text();
  }
  Observe(stream);
  return "";
}

void Machine::Hold(cuda::Stream stream, bool on) {
  Lock lock(*this);
  stream->held = on;
  WakeAll();
}

void Machine::HoldCollectives(int member, bool on) {
  Lock lock(*this);
  Include(member, on, &held_members_);
  WakeAll();
}

void Machine::LimitQueue(int groups) {
  Lock lock(*this);
  queue_limit_ = groups;
  WakeAll();
}

void Machine::SlowAborts(std::chrono::milliseconds late) {
  Lock lock(*this);
  abort_delay_ = late;
}

void Machine::HoldProgress(int member, bool on) {
  Lock lock(*this);
  Include(member, on, &held_progress_);
  WakeAll();
}

std::string Machine::Stuck() {
  Lock lock(*this);
  return StuckText();
}

std::vector<Call> Machine::Calls() {
  Lock lock(*this);
  return {calls_.begin(), calls_.end()};
}

std::vector<std::string> Machine::Violations() {
  Lock lock(*this);
  return violations_;
}

Leaks Machine::CountLeaks() {
  Lock lock(*this);
  Leaks leaks;
  for (const cuda::ContextState& context : contexts_)
    leaks.contexts += context.retained;
  for (const cuda::StreamState& stream : streams_) {
    leaks.streams += stream.live && stream.context->default_stream != &stream;
  }
  for (const cuda::EventState& event : events_) leaks.events += event.live;
  for (const auto& [data, allocation] : allocations_) {
    if (!allocation.live) continue;
    (allocation.on_host ? leaks.host_allocations : leaks.device_allocations) += 1;
  }
  count_nccl(&leaks);
  return leaks;
}

// ---- Calls

bool Machine::Enter(Call call, int32_t* code, bool* asynchronous) {
  contexts_of_thread();  // the thread's state is of this generation
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof(name));
  call.thread = name;
  call.rank = this_thread.rank;
  Call* const last = this_thread.last_call;
  if (last != nullptr && last->function == call.function &&
      last->arguments == call.arguments && last->rank == call.rank) {
    last->times += 1;
  } else {
    calls_.push_back(call);
    this_thread.last_call = &calls_.back();
  }
  for (Injected& injected : injections_) {
    const Injection& injection = injected.injection;
    if (injection.function != call.function) continue;
    if (injection.member != -1 && injection.member != call.member) continue;
    if (injection.rank != -1 && injection.rank != call.rank) continue;
    if (!injection.thread.empty() && injection.thread != call.thread) continue;
    injected.calls += 1;
    if (injection.call != 0 && injection.call != injected.calls) continue;
    *code = injection.code;
    *asynchronous = injection.asynchronous;
    return true;
  }
  return false;
}

void Machine::Violate(const std::string& what) {
  violations_.push_back(this_thread.rank < 0
                            ? what
                            : "rank " + std::to_string(this_thread.rank) + ": " + what);
}

std::vector<cuda::Context>& Machine::contexts_of_thread() {
  if (this_thread.generation != generation_) {
    this_thread.generation = generation_;
    this_thread.last_call = nullptr;
    this_thread.contexts.clear();
  }
  return this_thread.contexts;
}

// ---- Streams

cuda::Stream Machine::NewStream(cuda::Context context) {
  cuda::StreamState& stream = streams_.emplace_back();
  stream_handles_.insert(&stream);
  stream.id = static_cast<int>(streams_.size());
  stream.context = context;
  stream.pace = static_cast<cuda::StreamState::Pace>(Random() % 3);
  return &stream;
}

void Machine::DestroyStream(cuda::Stream stream) {
  stream->live = false;
  // Items on it still run; its thread ends behind them.
  stream->released = stream->last;
  stream->leaving = stream->queue.empty();
  WakeAll();
  stream->wake.notify_all();
}

cuda::Event Machine::NewEvent(cuda::Context context, bool timed) {
  cuda::EventState& event = events_.emplace_back();
  event_handles_.insert(&event);
  event.id = static_cast<int>(events_.size());
  event.context = context;
  event.timed = timed;
  return &event;
}

bool Machine::IsLive(cuda::Stream stream) const {
  return stream_handles_.count(stream) > 0 && stream->live;
}

bool Machine::IsLive(cuda::Event event) const {
  return event_handles_.count(event) > 0 && event->live;
}

cuda::Stream Machine::Resolve(cuda::Stream stream, cuda::Context context) {
  if (stream != nullptr) return IsLive(stream) ? stream : nullptr;
  if (context == nullptr) return nullptr;
  if (context->default_stream == nullptr) context->default_stream = NewStream(context);
  return context->default_stream;
}

void Machine::Put(cuda::Stream stream, std::unique_ptr<Item> item) {
  using Pace = cuda::StreamState::Pace;
  item->number = ++stream->last;
  item->Placed({stream, item->number});
  Publish(item.get());
  stream->queue.push_back(std::move(item));
  const bool now = stream->pace == Pace::kEager ||
                   (stream->pace == Pace::kMixed && Random() % 2 == 0);
  if (now) stream->released = stream->last;
  StartThread(stream);
  WakeAll();
}

bool Machine::CanStart(const cuda::StreamState& stream) const {
  if (stream.held || stream.queue.empty()) return false;
  Item& item = *stream.queue.front();
  return item.number <= stream.released && item.CanStart();
}

void Machine::StartThread(cuda::Stream stream) {
  if (stream->has_thread) return;
  stream->has_thread = true;
  // Seen by the sanitizer: the start of a thread comes before all of it.
  const bool was_hidden = hidden;
  if (was_hidden) Show();
  std::thread([this, stream] { Work(stream); }).detach();
  if (was_hidden) Hide();
}

void Machine::Work(cuda::Stream stream) {
  pthread_setname_np(pthread_self(), "gpu_stream");
  Lock lock(*this);
  while (true) {
    lock.Await(stream->wake, [&] { return stream->leaving || CanStart(*stream); });
    if (!stream->leaving) RunFront(stream, &lock);
    if (stream->leaving || (!stream->live && stream->queue.empty())) break;
  }
  stream->has_thread = false;
  changed_.notify_all();
}

void Machine::RunFront(cuda::Stream stream, Lock* lock) {
  Item& item = *stream->queue.front();
  item.started = true;
  lock->Without([&] {
    Observe(&item);
    item.Start();
  });
  lock->Await(stream->wake, [&] { return stream->leaving || item.CanFinish(); });
  if (stream->leaving) return;
  lock->Without([&] {
    item.Finish();
    Publish(stream);
  });
  item.Ended();
  stream->done = item.number;
  stream->queue.pop_front();
  WakeAll();
}

void Machine::WakeAll() {
  for (cuda::StreamState& stream : streams_) {
    if (!stream.queue.empty()) stream.wake.notify_all();
  }
  changed_.notify_all();
}

void Machine::Release(cuda::Stream stream, uint64_t number) {
  if (stream->released >= number) return;
  stream->released = number;
  WakeAll();
}

void Machine::AddNeeded(const Place& place,
                        std::map<cuda::Stream, uint64_t>* needed) const {
  uint64_t& until = (*needed)[place.stream];
  if (until >= place.number) return;
  const uint64_t from = until;
  until = place.number;
  std::vector<Place> needs;
  for (const std::unique_ptr<Item>& item : place.stream->queue) {
    if (item->number <= from) continue;
    if (item->number > place.number) break;
    item->AddNeeds(&needs);
  }
  for (const Place& need : needs) AddNeeded(need, needed);
}

void Machine::Demand(const Place& place, int* polls) {
  *polls += 1;
  if (*polls < kPatience && Random() % 2 == 0) return;
  std::map<cuda::Stream, uint64_t> needed;
  AddNeeded(place, &needed);
  if (*polls >= kPatience || Random() % 2 == 0) {
    for (const auto& [stream, number] : needed) Release(stream, number);
    return;
  }
  // By its id, for addresses differ between runs.
  std::map<int, Place> by_id;
  for (const auto& [stream, number] : needed) by_id[stream->id] = {stream, number};
  const auto chosen = std::next(by_id.begin(), Random() % by_id.size());
  Release(chosen->second.stream, chosen->second.number);
}

// ---- Waits between streams

// The streams whose present work has to end before the stream's own can go on.
std::vector<cuda::Stream> Machine::Blockers(const cuda::StreamState& stream) const {
  std::vector<cuda::Stream> blockers;
  if (stream.queue.empty()) return blockers;
  std::vector<Place> needs;
  stream.queue.front()->AddNeeds(&needs);
  for (const Place& need : needs) {
    const auto& queue = need.stream->queue;
    if (queue.empty() || queue.front()->number >= need.number) continue;
    blockers.push_back(need.stream);
  }
  return blockers;
}

std::string Machine::StuckText() const {
  for (const cuda::StreamState& first : streams_) {
    // All that is reached from here; a way back is a circle.
    std::map<const cuda::StreamState*, const cuda::StreamState*> reached_from;
    std::vector<const cuda::StreamState*> open = {&first};
    while (!open.empty()) {
      const cuda::StreamState* const at = open.back();
      open.pop_back();
      for (const cuda::Stream next : Blockers(*at)) {
        if (next == &first) {
          std::string text;
          for (const cuda::StreamState* each = at;; each = reached_from[each]) {
            text = "stream " + std::to_string(each->id) + " is in " +
                   each->queue.front()->text() + ", which waits for what is behind\n" +
                   text;
            if (each == &first) break;
          }
          return text + "stream " + std::to_string(first.id) + "'s";
        }
        if (reached_from.emplace(next, at).second) open.push_back(next);
      }
    }
  }
  return "";
}

// ---- Memory

void* Machine::Allocate(size_t bytes, bool on_host) {
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* const memory = aligned_alloc(kAlignment, rounded);
  if (memory == nullptr) return nullptr;
  FillWithGarbage(memory, bytes);
  Poison(static_cast<char*>(memory) + bytes, rounded - bytes);
  allocations_[static_cast<char*>(memory)] = {static_cast<char*>(memory), bytes,
                                              on_host, true};
  return memory;
}

bool Machine::Free(void* memory, bool on_host) {
  const auto found = allocations_.find(static_cast<char*>(memory));
  if (found == allocations_.end()) return false;
  Allocation& allocation = found->second;
  if (!allocation.live || allocation.on_host != on_host) return false;
  allocation.live = false;
  FillWithGarbage(memory, allocation.bytes);
  Poison(memory, allocation.bytes);
  quarantine_.push_back(found->first);
  quarantined_ += allocation.bytes;
  ReleaseQuarantine(kQuarantine);
  return true;
}

void Machine::ReleaseQuarantine(size_t limit) {
  while (quarantined_ > limit) {
    const auto found = allocations_.find(quarantine_.front());
    quarantine_.pop_front();
    quarantined_ -= found->second.bytes;
    Unpoison(found->second.data, found->second.bytes);
    free(found->second.data);
    allocations_.erase(found);
  }
}

std::string Machine::Problem(const void* memory, size_t bytes, bool on_host) const {
  if (bytes == 0 || (unified_ && !on_host)) return "";
  const char* const start = static_cast<const char*>(memory);
  auto found = allocations_.upper_bound(start);
  const char* const kind = on_host ? "pinned host memory" : "device memory";
  if (found == allocations_.begin()) return std::string("no ") + kind;
  --found;
  const Allocation& allocation = found->second;
  if (start >= allocation.data + std::max<size_t>(allocation.bytes, 1)) {
    return std::string("no ") + kind;
  }
  if (!allocation.live) return std::string(kind) + " that has been freed";
  if (allocation.on_host != on_host) return std::string("no ") + kind;
  if (start + bytes > allocation.data + allocation.bytes) {
    return std::string(kind) + " of " + std::to_string(allocation.bytes) +
           " bytes, of which " + std::to_string(bytes) + " are used from byte " +
           std::to_string(start - allocation.data) + " on";
  }
  return "";
}

// Seen by the sanitizer: a late user of the memory has a race with this.
void Machine::FillWithGarbage(void* memory, size_t bytes) {
  uint64_t state = Random();
  const bool was_hidden = hidden;
  if (was_hidden) Show();
  char* const to = static_cast<char*>(memory);
  for (size_t at = 0; at < bytes; at += sizeof(state)) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const uint64_t word = state ^ (state >> 29);
    memcpy(to + at, &word, std::min(sizeof(word), bytes - at));
  }
  if (was_hidden) Hide();
}

}  // namespace keras_hvd::stand_in

extern "C" keras_hvd::stand_in::Control* keras_hvd_gpu_stand_in() {
  return &keras_hvd::stand_in::Machine::Get();
}
