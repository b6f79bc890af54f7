// This rank's GPU: the stream of its collectives, and their events and memory.
//
// A caller's work and the collectives run on separate streams, synchronized only by
// events: `Record` marks a point on one stream, and `MakeWait` makes another wait for
// it. Neither blocks the calling thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "tf_ops/cuda/driver.h"

namespace keras_hvd::cuda {

// Whether an event records its time. The GPU writes a time at each event that does.
enum class Timing { kOff, kOn };

// Any thread may call all of it.
class Gpu {
 public:
  // Opens a device by its number, through its primary context, which TensorFlow and the
  // CUDA runtime use too.
  static Status Open(std::shared_ptr<const Driver> driver, int ordinal,
                     std::shared_ptr<Gpu>* gpu);
  // The device number of a caller's stream; an error if the stream's context is not the
  // primary one. A null stream means the calling thread's current context.
  static Status DeviceOf(const Driver& driver, Stream stream, int* ordinal);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  const Driver& driver() const { return *driver_; }
  int ordinal() const { return ordinal_; }
  // Equal for two processes that share the device, or the same part of one.
  const Uuid& uuid() const { return uuid_; }
  int compute_capability() const { return compute_capability_; }  // 90 for 9.0
  // Has the highest priority and is independent of the default stream.
  Stream stream() const { return stream_; }

  // Makes the GPU's context current on the calling thread during its lifetime. Within
  // the lifetime of another one it does nothing.
  class Current {
   public:
    explicit Current(const Gpu& gpu);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    // Callers need it if they call more than this GPU's functions.
    const Status& status() const { return status_; }

   private:
    const Gpu& gpu_;
    const Gpu* const outer_;  // the GPU whose context is already current, or null
    const Status status_;
  };

  // Records an event after all that is on the stream. The caller owns it until Release.
  Status Record(Stream stream, Event* event, Timing timing = Timing::kOff);
  // Everything put on the stream from now on runs after the event.
  Status MakeWait(Stream stream, Event event);
  // Whether the event has occurred.
  Status Query(Event event, bool* passed);
  // An event may be released as soon as MakeWait has returned for each stream.
  void Release(Event event, Timing timing = Timing::kOff);
  // The time from one event to a later one. Both must be timed and have occurred.
  Status Elapsed(Event from, Event to, std::chrono::nanoseconds* elapsed);
  // Opens a stream that gets only events, which therefore occur at once.
  Status OpenIdleStream(Stream* stream);

  // On the collectives' stream, in its order.
  Status CopyToHost(void* to, const void* from, size_t bytes);
  Status CopyToDevice(void* to, const void* from, size_t bytes);
  Status CopyOnDevice(void* to, const void* from, size_t bytes);
  Status SetZero(void* memory, size_t bytes);

 private:
  Gpu(std::shared_ptr<const Driver> driver, int ordinal)
      : driver_(std::move(driver)), ordinal_(ordinal) {}
  Status Start();
  Status ReadCapability();
  // Calls one of the driver's functions, called `name`, with the context current.
  template <typename Function, typename... Arguments>
  Status Call(const char* name, Function Functions::* function, Arguments... arguments);
  Status TakeEvent(Event* event, Timing timing);
  std::vector<Event>& FreeEvents(Timing timing) {
    return timing == Timing::kOn ? free_timed_events_ : free_events_;
  }

  const std::shared_ptr<const Driver> driver_;
  const int ordinal_;
  Device device_ = 0;
  Uuid uuid_ = {};
  int compute_capability_ = 0;
  Context context_ = nullptr;
  Stream stream_ = nullptr;
  std::mutex mutex_;
  // mutex_ guards everything below.
  Stream idle_stream_ = nullptr;  // null: nobody has asked for it
  std::vector<Event> free_events_;
  std::vector<Event> free_timed_events_;
};

// Memory of the GPU, or host memory that the GPU can copy without the CPU. Everything
// enqueued with it must have run when it is given back.
class Memory {
 public:
  enum class Space { kDevice, kHost };
  Memory() = default;
  static Status Allocate(std::shared_ptr<Gpu> gpu, Space space, size_t bytes,
                         Memory* memory);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  // Leaves the memory to the end of the process.
  void Abandon() { data_ = nullptr; }

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Space space() const { return space_; }

 private:
  Status Start();

  std::shared_ptr<Gpu> gpu_;
  Space space_ = Space::kDevice;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace keras_hvd::cuda
