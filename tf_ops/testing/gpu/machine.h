// The machine that the stand-ins pretend: devices, streams, memory, and the scheduler
// that runs the streams' work in the worst order that events allow.
//
// One lock guards all of it. Code that touches a test's memory runs without the lock.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tf_ops/testing/gpu/stand_in.h"
#include "tf_ops/testing/gpu/thread_sanitizer.h"

namespace keras_hvd::stand_in {

// All parts in one line, for people.
template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// An item's place: its stream, and its number there, from 1.
struct Place {
  cuda::Stream stream = nullptr;
  uint64_t number = 0;
};

// Work that is put on a stream.
class Item {
 public:
  virtual ~Item() = default;
  virtual std::string text() const = 0;

  // With the lock: whether it may start, and then whether it may finish.
  virtual bool CanStart() { return true; }
  virtual bool CanFinish() { return true; }
  // Without the lock, on the stream's thread.
  virtual void Start() {}
  virtual void Finish() {}
  // With the lock: it has run.
  virtual void Ended() {}
  // Adds the items that have to run, or to start, before it can finish.
  virtual void AddNeeds(std::vector<Place>*) const {}
  virtual void Placed(const Place&) {}

  uint64_t number = 0;
  bool started = false;
};

// One record of an event.
struct Record {
  Place place;
  bool done = false;
  int polls = 0;
  std::chrono::steady_clock::time_point time;
};

}  // namespace keras_hvd::stand_in

namespace keras_hvd::cuda {

struct ContextState {
  int device = 0;
  int retained = 0;
  Stream default_stream = nullptr;
};

struct StreamState {
  // When its items run: at once; when they are asked for; or now this way and now that.
  enum class Pace { kEager, kLazy, kMixed };

  int id = 0;
  Context context = nullptr;
  Pace pace = Pace::kEager;
  bool live = true;
  bool held = false;
  bool leaving = false;   // its thread ends, with whatever is left
  uint64_t last = 0;      // the number of the item put on it last
  uint64_t done = 0;      // the one that has run last
  uint64_t released = 0;  // those up to this one may run
  std::deque<std::unique_ptr<stand_in::Item>> queue;
  std::condition_variable wake;
  bool has_thread = false;
};

struct EventState {
  int id = 0;
  Context context = nullptr;
  bool timed = true;
  bool live = true;
  std::shared_ptr<stand_in::Record> latest;
};

}  // namespace keras_hvd::cuda

namespace keras_hvd::stand_in {

struct Allocation {
  char* data = nullptr;
  size_t bytes = 0;
  bool on_host = false;
  bool live = true;
};

class Machine : public Control {
 public:
  static Machine& Get();

  // The lock. The calling thread is hidden from the thread sanitizer meanwhile.
  class Lock {
   public:
    explicit Lock(Machine& machine) : lock_(Hidden(machine.mutex_)) {}
    ~Lock() {
      lock_.unlock();
      Show();
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    template <typename Condition>
    void Await(std::condition_variable& changed, const Condition& condition) {
      changed.wait(lock_, condition);
    }
    template <typename Condition>
    bool AwaitUntil(std::condition_variable& changed,
                    std::chrono::steady_clock::time_point end,
                    const Condition& condition) {
      return changed.wait_until(lock_, end, condition);
    }
    // Runs something without it.
    template <typename Body>
    void Without(const Body& body) {
      lock_.unlock();
      Show();
      body();
      Hide();
      lock_.lock();
    }

   private:
    static std::mutex& Hidden(std::mutex& mutex) {
      Hide();
      return mutex;
    }
    std::unique_lock<std::mutex> lock_;
  };

  // ---- Control
  void Reset(uint64_t seed, int devices) override;
  void SetDevices(int devices) override;
  void SetNcclVersion(int version) override;
  void SetComputeCapability(int device, int capability) override;
  void Inject(const Injection& injection) override;
  void SetRank(int rank) override;
  void Enqueue(cuda::Stream stream, std::function<void()> kernel) override;
  std::string Synchronize(cuda::Stream stream,
                          std::chrono::milliseconds limit) override;
  void Hold(cuda::Stream stream, bool on) override;
  void HoldCollectives(int member, bool on) override;
  void HoldProgress(int member, bool on) override;
  void LimitQueue(int groups) override;
  void SlowAborts(std::chrono::milliseconds late) override;
  std::string Stuck() override;
  std::vector<Call> Calls() override;
  std::vector<std::string> Violations() override;
  Leaks CountLeaks() override;

  // ---- All of the following with the lock.

  // Records a call. True: it fails with `*code`, or asynchronously.
  bool Enter(Call call, int32_t* code, bool* asynchronous);
  void Violate(const std::string& what);
  uint64_t Random() { return random_(); }

  cuda::Stream NewStream(cuda::Context context);
  void DestroyStream(cuda::Stream stream);
  cuda::Event NewEvent(cuda::Context context, bool timed);
  bool IsLive(cuda::Stream stream) const;
  bool IsLive(cuda::Event event) const;
  // The stream itself, or the default one of the context; null: there is none.
  cuda::Stream Resolve(cuda::Stream stream, cuda::Context context);
  void Put(cuda::Stream stream, std::unique_ptr<Item> item);
  // Somebody waits for it: it runs soon.
  void Demand(const Place& place, int* polls);
  void WakeAll();

  void* Allocate(size_t bytes, bool on_host);
  bool Free(void* memory, bool on_host);
  // "" if all of it may be used now; otherwise its state.
  std::string Problem(const void* memory, size_t bytes, bool on_host) const;
  void FillWithGarbage(void* memory, size_t bytes);

  // The calling thread's current contexts.
  std::vector<cuda::Context>& contexts_of_thread();
  cuda::Context context(int device) { return &contexts_[device]; }

  int devices() const { return devices_; }
  int nccl_version() const { return nccl_version_; }
  int compute_capability(int device) const { return compute_capabilities_[device]; }
  std::condition_variable& changed() { return changed_; }  // WakeAll was called
  size_t queue_limit() const { return queue_limit_; }      // 0: none
  std::chrono::milliseconds abort_delay() const { return abort_delay_; }
  bool IsHeld(int member) const { return held_members_.count(member) > 0; }
  bool IsProgressHeld(int member) const { return held_progress_.count(member) > 0; }

  // Hooks that NCCL's library sets.
  std::function<void()> reset_nccl = [] {};
  std::function<void(Leaks*)> count_nccl = [](Leaks*) {};

  bool initialized = false;
  int32_t sticky_error = 0;

 private:
  struct Injected {
    Injection injection;
    int calls = 0;  // of its function, since it was asked for
  };

  Machine();
  void Work(cuda::Stream stream);
  void RunFront(cuda::Stream stream, Lock* lock);
  bool CanStart(const cuda::StreamState& stream) const;
  void Release(cuda::Stream stream, uint64_t number);
  void AddNeeded(const Place& place, std::map<cuda::Stream, uint64_t>* needed) const;
  std::vector<cuda::Stream> Blockers(const cuda::StreamState& stream) const;
  std::string StuckText() const;
  void StartThread(cuda::Stream stream);
  void EndStreams(Lock* lock);
  void ReleaseQuarantine(size_t limit);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  uint64_t generation_ = 1;
  int devices_ = 4;
  int nccl_version_ = kNcclVersion;
  std::vector<int> compute_capabilities_;
  const bool unified_;
  std::deque<cuda::ContextState> contexts_;
  std::deque<cuda::StreamState> streams_;  // the destroyed ones too
  std::set<const void*> stream_handles_;
  std::deque<cuda::EventState> events_;
  std::set<const void*> event_handles_;
  std::map<const char*, Allocation> allocations_;
  std::deque<const char*> quarantine_;
  size_t quarantined_ = 0;
  std::set<int> held_members_;
  std::set<int> held_progress_;
  size_t queue_limit_ = 0;
  std::chrono::milliseconds abort_delay_{0};
  std::deque<Call> calls_;
  std::vector<Injected> injections_;
  std::vector<std::string> violations_;
};

}  // namespace keras_hvd::stand_in
