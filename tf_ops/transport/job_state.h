// What the ranks of a job know of each other and of the job, besides their messages:
// who they are, who has left, whether the job has failed, and how to wake somebody.
#ifndef KERAS_HVD_TF_OPS_TRANSPORT_JOB_STATE_H_
#define KERAS_HVD_TF_OPS_TRANSPORT_JOB_STATE_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "tf_ops/transport/doorbell.h"
#include "tf_ops/transport/status.h"

namespace keras_hvd {

// One entry of a rank's record of what it did last. Written by its rank only; a reader
// may see an entry half changed, which is good enough for a report.
struct OperationRecord {
  static constexpr int kNameWords = 12;
  std::atomic<uint64_t> time_ns;
  std::atomic<uint32_t> phase;
  std::atomic<uint32_t> kind;
  std::atomic<uint64_t> name[kNameWords];
};

// The last ones of a rank; entry n is at n modulo kRecords.
struct OperationHistory {
  static constexpr int kRecords = 64;
  std::atomic<uint64_t> written;
  OperationRecord records[kRecords];
};

// As one rank sees it. Any thread.
class JobState {
 public:
  JobState(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~JobState() = default;

  // The rank that decides what runs when.
  static constexpr int kCoordinator = 0;

  // This rank, of 0..size-1.
  int rank() const { return rank_; }
  bool is_coordinator() const { return rank_ == kCoordinator; }
  int size() const { return size_; }

  // ---- Failure

  virtual bool Failed() const = 0;
  // The first failure of the job, or OK.
  virtual Status Failure() const = 0;
  // Records the job's first failure and wakes everybody. `dead`: the rank whose death
  // it is (-1: none). Returns false if another failure was first.
  virtual bool Fail(Code code, const std::string& text, int dead = -1) = 0;

  // ---- What one rank reports for all: each is true for the first that asks.

  virtual bool ClaimFailureReport() = 0;
  virtual bool ClaimGpuWarning() = 0;
  // Of the batch with this number; ranks count batches alike.
  virtual bool ClaimStallReport(uint64_t batch) = 0;

  // ---- The ranks

  // "rank 2 (pid 4242 on host7)".
  virtual std::string Describe(int rank) const = 0;
  // What keeps a rank's process from running, as the end of a sentence about it; "" if
  // nothing is known.
  virtual std::string Obstacle(int rank) const = 0;
  // Whether a rank has left in good order.
  virtual bool HasShutDown(int rank) const = 0;
  // Leaves the job in good order, and rings for everybody.
  virtual void ShutDown() = 0;
  // Whether this rank has left, or crashes.
  virtual bool has_departed() const = 0;
  // How many decisions of the coordinator a rank has carried out. One that has left
  // carries out no more.
  virtual uint64_t CarriedOut(int rank) const = 0;
  // This rank has carried out one more. One thread at a time.
  virtual void NoteCarriedOut() = 0;
  virtual OperationHistory& History(int rank) = 0;

  // ---- Waking

  // This rank's.
  virtual Doorbell& bell() = 0;
  virtual void RingCoordinator(uint32_t about = Doorbell::kEverything) = 0;
  virtual void RingAll() = 0;

  // ---- What the coordinator says for all, before it decides what depends on it

  // Whether outputs are compared after each collective. Ranks that were told otherwise
  // would wait for each other.
  virtual bool compares_outputs() const = 0;
  virtual void set_compares_outputs(bool compares) = 0;
  // Whether submissions say when they were made: a timeline is written, and does not
  // pause for want of room. Each is set by a thread of its own.
  virtual bool WantsTimes() const = 0;
  virtual void set_timeline_on(bool on) = 0;
  virtual void set_timeline_paused(bool paused) = 0;

 private:
  const int rank_;
  const int size_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_TRANSPORT_JOB_STATE_H_
