// The driving thread's records for the timeline, and the ring that passes them to the
// thread that writes them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "tf_ops/operation/description.h"
#include "tf_ops/transport/doorbell.h"

namespace keras_hvd {

// The phases of a batch of GPU tensors on the GPU. Collectives that NCCL lacks go
// through host memory, and a rank alone copies.
enum class GpuPhase : int32_t {
  kWaitForInputs = 0,   // for work that callers have put on their streams
  kNccl = 1,            // an NCCL group
  kCopyToHost = 2,      // and then:
  kHostCollective = 3,  // by the host, in host memory
  kCopyToGpu = 4,
  kCopyOnGpu = 5,
};
inline constexpr int kGpuPhases = 6;

// Times are from NowNanoseconds.
struct TimelineRecord {
  enum class Type : int32_t {
    kDecision,  // a batch was decided; `number` 1: this rank runs it, 0: only others do
    kArrivals,  // when `number` ranks submitted a request of the batch
    kRequest,   // that request, after all of its arrivals
    kBegin,     // this rank began the batch
    kPhase,     // a CollectivePhase (`number`): from, to, first byte, end of bytes
    kEnd,       // the batch ended; `number` 1: successfully, 0: not
    kMissing,   // a request waits for a rank (`number`): since, now
    kCycle,     // decisions were made
    kGpuPhase,  // a GpuPhase (`number`) of a batch of `ranks[0]` requests: from, to,
                // when it was enqueued, its precision; with its first request
    kBatchElsewhere,  // the leader `number` of another host has carried out a batch of
                      // `ranks[0]` requests: from, to; with its first request
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

// One thread adds records, another removes them, and neither ever waits.
class TimelineRing {
 public:
  explicit TimelineRing(size_t capacity) : records_(capacity) {}

  size_t capacity() const { return records_.size(); }
  size_t room() const { return capacity() - (next_ - read_.load()); }

  // For the adding thread, if there is room. Publish makes added records visible.
  TimelineRecord& Add() { return records_[next_++ % records_.size()]; }
  void Publish() { written_.store(next_, std::memory_order_release); }

  // For the removing thread: the next record until Remove; null if there is none.
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
