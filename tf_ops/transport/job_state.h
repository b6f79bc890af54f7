// What the ranks of a job know about each other and the job, apart from messages: who
// they are, who has left, whether the job has failed, and how to wake a rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "tf_ops/transport/doorbell.h"
#include "tf_ops/transport/status.h"

namespace keras_hvd {

// One entry of the record of a rank's latest operations. Only that rank writes it. A
// reader may see a half-changed entry, which is good enough for a report.
struct OperationRecord {
  static constexpr int kNameWords = 12;
  std::atomic<uint64_t> time_ns;
  std::atomic<uint32_t> phase;
  std::atomic<uint32_t> kind;
  std::atomic<uint64_t> name[kNameWords];
};

// A rank's latest operations; entry n is at n modulo kRecords.
struct OperationHistory {
  static constexpr int kRecords = 64;
  std::atomic<uint64_t> written;
  OperationRecord records[kRecords];
};

// A batch that the leader of another host has carried out.
struct BatchElsewhere {
  int32_t rank = 0;  // the leader
  int32_t kind = 0;
  int32_t requests = 0;
  std::string name;  // of the first one
  Clock::time_point begin, end;
};

// One rank's view of the job. Any thread may call it.
class JobState {
 public:
  JobState(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~JobState() = default;

  // The rank that decides what runs when.
  static constexpr int kCoordinator = 0;

  static constexpr char kUsualWayToLeave[] = "its script ended or called shutdown";

  // This rank, in 0..size-1.
  int rank() const { return rank_; }
  bool is_coordinator() const { return rank_ == kCoordinator; }
  int size() const { return size_; }

  // ---- Failure

  virtual bool Failed() const = 0;
  // The first failure of the job, or OK.
  virtual Status Failure() const = 0;
  // Records the job's first failure and wakes everybody. `dead`: the rank that died, or
  // -1. Returns false if another failure was first.
  virtual bool Fail(Code code, const std::string& text, int dead = -1) = 0;

  // Returns when all ranks that can be reached know of the failure, or after two
  // seconds. Only the driving thread may call it.
  virtual void AwaitAllKnow() {}

  // ---- What one rank reports for all: each is true for the first that asks.

  // May wait a second for other hosts' accounts. Only the driving thread may call it.
  virtual bool ClaimFailureReport() = 0;
  virtual bool ClaimGpuWarning() = 0;
  // Claims the report for the batch with this number. All ranks number batches alike.
  virtual bool ClaimStallReport(uint64_t batch) = 0;

  // ---- The ranks

  // "rank 2 (pid 4242 on host7)".
  virtual std::string Describe(int rank) const = 0;
  // Why a rank's process is not running, to end a sentence about it; "" if nothing is
  // known.
  virtual std::string Obstacle(int rank) const = 0;
  // Whether a rank has left cleanly; false for those of other hosts.
  virtual bool HasShutDown(int rank) const = 0;
  // Leaves the job cleanly and rings for everybody.
  virtual void ShutDown() = 0;
  // How a rank has left, to follow "has left the job: ". Of those of other hosts only
  // the usual is known.
  virtual std::string HowItLeft(int) const { return kUsualWayToLeave; }
  // Says how this rank leaves, if not in the usual way. Call it before ShutDown.
  virtual void SayHowItLeaves(const std::string&) {}
  // Asks the leaders next to this rank for a sign of life, which takes a moment, and
  // those below whether their ranks' processes run; if something waits for one of them.
  virtual void AskForSigns() {}
  // Whether a leader that was asked has given none for seconds.
  virtual bool IsSilent(int) const { return false; }
  // A rank that has left cleanly and without which nothing is decided for this one: the
  // coordinator, or a leader on the way to it; -1 if there is none.
  virtual int DepartedAbove() const = 0;
  // Whether this rank has left or is crashing.
  virtual bool has_departed() const = 0;
  // How many of the coordinator's decisions a rank of this host has carried out. The
  // number stops growing when the rank leaves.
  virtual uint64_t CarriedOut(int rank) const = 0;
  // Whether a rank has left cleanly without carrying out the decision of this number,
  // from 1 on. Of other hosts' ranks, true for the leaders above this host only.
  virtual bool HasLeftBefore(int rank, uint64_t decision) const = 0;
  // Counts one more for this rank. Only one thread may call it at a time.
  virtual void NoteCarriedOut() = 0;
  virtual OperationHistory& History(int rank) = 0;
  // Whether that is known; of other hosts' ranks it is when they have told, on the rank
  // that reports the failure.
  virtual bool HasHistory(int) const { return true; }

  // ---- Waking

  // This rank's doorbell.
  virtual Doorbell& bell() = 0;
  // Of this rank's host: its leader, and all of its ranks.
  virtual void RingLeader(uint32_t about = Doorbell::kEverything) = 0;
  virtual void RingAll() = 0;

  // ---- What the coordinator says for all, before it decides what depends on it

  // Whether outputs are compared after each collective. All ranks must have the same
  // setting, or they would wait for each other.
  virtual bool compares_outputs() const = 0;
  virtual void set_compares_outputs(bool compares) = 0;
  // Whether submissions carry the time they were made: a timeline is being written and
  // is not paused for lack of space. A separate thread sets each of the two flags.
  virtual bool WantsTimes() const = 0;
  virtual void set_timeline_on(bool on) = 0;
  virtual void set_timeline_paused(bool paused) = 0;

  // ---- Other hosts

  // The ranks of a leader's host that have neither left nor carried out as many of the
  // coordinator's decisions, and leaders that have not said that all from them on have
  // done so. Asks these, which takes a moment. Only the driving thread may call it.
  virtual std::vector<int> Behind(uint64_t) { return {}; }
  // How many decisions the leader above asks about so; 0: it does not. Only the driving
  // thread may call it.
  virtual uint64_t AskedAbout() const { return 0; }
  // Tells it that they have. Only the driving thread may call it.
  virtual void AnswerAbove() {}

  // Tells the coordinator what this rank has carried out, if it leads another host and
  // submissions carry times. Only the driving thread may call it.
  virtual void TellOfBatch(BatchElsewhere) {}
  // What other hosts' leaders have told the coordinator since the last call. Only the
  // driving thread may call it.
  virtual std::vector<BatchElsewhere> TakeBatches() { return {}; }

  // Tells this rank's host, and those below, of leaders above that have left. What was
  // decided before that must be with the ranks here. Returns true if there was
  // anything. Only the driving thread may call it.
  virtual bool PassOnDepartures() { return false; }

  // Exchanges what is new with other hosts, without waiting. Returns true if there was
  // anything. Only the driving thread may call it.
  virtual bool Poll() { return false; }
  // When to call Poll at the latest, even if nothing happens.
  virtual Clock::time_point NextPoll() const { return Clock::time_point::max(); }

 private:
  const int rank_;
  const int size_;
};

}  // namespace keras_hvd
