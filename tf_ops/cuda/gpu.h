// This rank's GPU: the stream that its collectives run on, and the events and the
// memory that they need.
//
// A caller's work and the collectives are on streams of their own, which know of each
// other through events alone: `Record` marks a point on one stream, `MakeWait` has
// another not go on before it. Neither keeps the calling thread.
#ifndef KERAS_HVD_TF_OPS_CUDA_GPU_H_
#define KERAS_HVD_TF_OPS_CUDA_GPU_H_

#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "tf_ops/cuda/driver.h"

namespace keras_hvd::cuda {

// Whether an event notes when it comes. The GPU writes a time at each that does.
enum class Timing { kOff, kOn };

// All of it may be called on any thread.
class Gpu {
 public:
  // Of a device by its number, through its primary context, which TensorFlow and the
  // CUDA runtime use too.
  static Status Open(std::shared_ptr<const Driver> driver, int ordinal,
                     std::shared_ptr<Gpu>* gpu);
  // The number of the device that a caller's stream is of; an error where it is of a
  // context other than the primary one. Null: of the calling thread's current context.
  static Status DeviceOf(const Driver& driver, Stream stream, int* ordinal);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  const Driver& driver() const { return *driver_; }
  int ordinal() const { return ordinal_; }
  // The same for two processes that share the device, or their part of one.
  const Uuid& uuid() const { return uuid_; }
  int compute_capability() const { return compute_capability_; }  // 90 for 9.0
  // Of the greatest priority, and independent of the default stream.
  Stream stream() const { return stream_; }

  // Makes the GPU's context the calling thread's, as long as it lives.
  class Current {
   public:
    explicit Current(const Gpu& gpu);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    // Who calls more than this GPU's functions needs it.
    const Status& status() const { return status_; }

   private:
    const Driver& driver_;
    const Status status_;
  };

  // An event behind all that is on the stream now. It is the caller's until Release.
  Status Record(Stream stream, Event* event, Timing timing = Timing::kOff);
  // Whatever is put on the stream from now on runs after the event.
  Status MakeWait(Stream stream, Event event);
  // Whether the event has come.
  Status Query(Event event, bool* passed);
  // An event may be released as soon as the streams that wait for it have been told so.
  void Release(Event event, Timing timing = Timing::kOff);
  // The time from one event to a later one; both are timed and have come.
  Status Elapsed(Event from, Event to, std::chrono::nanoseconds* elapsed);
  // A stream that nothing is put on but events, which so come at once.
  Status OpenIdleStream(Stream* stream);

  // On the collectives' stream, in its order.
  Status CopyToHost(void* to, const void* from, size_t bytes);
  Status CopyToDevice(void* to, const void* from, size_t bytes);
  Status SetZero(void* memory, size_t bytes);

 private:
  Gpu(std::shared_ptr<const Driver> driver, int ordinal)
      : driver_(std::move(driver)), ordinal_(ordinal) {}
  Status Start();
  Status ReadCapability();
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
  // All below is guarded by mutex_.
  Stream idle_stream_ = nullptr;  // null: nobody has asked for it
  std::vector<Event> free_events_;
  std::vector<Event> free_timed_events_;
};

// Memory of the GPU, or of the host where the GPU can copy it without the CPU. What is
// enqueued with it must have passed when it is given back.
class Memory {
 public:
  enum class Space { kDevice, kHost };
  Memory() = default;
  static Status Allocate(std::shared_ptr<Gpu> gpu, Space space, size_t bytes,
                         Memory* memory);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  // Leaves it to the end of the process.
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

#endif  // KERAS_HVD_TF_OPS_CUDA_GPU_H_
