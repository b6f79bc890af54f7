// What the driving thread notes for the timeline, and the ring through which it hands
// that to the thread that writes it down.
#ifndef KERAS_HVD_TF_OPS_TIMELINE_TIMELINE_RECORD_H_
#define KERAS_HVD_TF_OPS_TIMELINE_TIMELINE_RECORD_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "tf_ops/operation/description.h"
#include "tf_ops/transport/doorbell.h"

namespace keras_hvd {

// Nanoseconds of the clock that all processes of a host share.
inline int64_t TimelineNow() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             Clock::now().time_since_epoch())
      .count();
}

// What a batch of tensors on a GPU goes through there. What NCCL has not goes through
// the host's memory.
enum class GpuPhase : int32_t {
  kWaitForInputs = 0,   // for what their callers have put on their streams
  kNccl = 1,            // a group of NCCL's
  kCopyToHost = 2,      // and then:
  kHostCollective = 3,  // of host memory, by the host
  kCopyToGpu = 4,
};
inline constexpr int kGpuPhases = 5;

// Times are TimelineNow's.
struct TimelineRecord {
  enum class Type : int32_t {
    kDecision,  // a batch was decided; `number` 1: this rank runs it, 0: others do
    kArrivals,  // `number` ranks submitted a request of it, and when
    kRequest,   // that request, behind all of its arrivals
    kBegin,     // this rank began with the batch
    kPhase,     // a CollectivePhase (`number`): from, to, first byte, end of bytes
    kEnd,       // the batch ended; `number` 1: well, 0: not
    kMissing,   // a request waits for a rank (`number`): since, now
    kCycle,     // decisions were made
    kGpuPhase,  // a GpuPhase (`number`) of a batch of `ranks[0]` requests: from, to,
                // when it was enqueued, how exact that is; with its first request
  };
  static constexpr int kTimes = 4;

  Type type = Type::kCycle;
  uint32_t session = 0;  // from one start of the timeline to its stop
  uint64_t batch = 0;
  int32_t number = 0;
  int32_t ranks[kTimes] = {};
  int64_t times[kTimes] = {};
  std::shared_ptr<const Description> description;
};

// One thread puts records in, another takes them out, and neither ever waits.
class TimelineRing {
 public:
  explicit TimelineRing(size_t capacity) : records_(capacity) {}

  size_t capacity() const { return records_.size(); }
  size_t room() const { return capacity() - (next_ - read_.load()); }

  // For who puts in, where there is room. What was added is seen from Publish on.
  TimelineRecord& Add() { return records_[next_++ % records_.size()]; }
  void Publish() { written_.store(next_, std::memory_order_release); }

  // For who takes out: the next record, until Remove; null if there is none.
  TimelineRecord* Front() {
    const uint64_t read = read_.load(std::memory_order_relaxed);
    if (written_.load(std::memory_order_acquire) == read) return nullptr;
    return &records_[read % records_.size()];
  }
  void Remove() { read_.store(read_.load(std::memory_order_relaxed) + 1); }

 private:
  std::vector<TimelineRecord> records_;
  uint64_t next_ = 0;
  alignas(64) std::atomic<uint64_t> written_{0};
  alignas(64) std::atomic<uint64_t> read_{0};
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_TIMELINE_TIMELINE_RECORD_H_
