// The knowledge of a job's ranks about each other and the job, apart from messages: who
// they are, who has left, whether the job has failed, and how to wake a rank.
//
// Ranks of one host share it in their segment. With other hosts there is more to know:
// see hosts_job_state.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tf_ops/transport/doorbell.h"
#include "tf_ops/transport/segment.h"
#include "tf_ops/transport/status.h"
#include "tf_ops/transport/topology.h"

namespace keras_hvd {

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
  // The job has no other ranks than those that share the segment.
  JobState(std::shared_ptr<Segment> segment, int rank);
  JobState(std::shared_ptr<Segment> segment, Topology topology);
  virtual ~JobState() = default;
  // A copy would not know other hosts.
  JobState(const JobState&) = delete;
  JobState& operator=(const JobState&) = delete;

  // The rank that decides what runs when.
  static constexpr int kCoordinator = 0;

  static constexpr char kUsualWayToLeave[] = "its script ended or called shutdown";

  // This rank, in 0..size-1.
  int rank() const { return topology_.rank(); }
  bool is_coordinator() const { return rank() == kCoordinator; }
  int size() const { return topology_.size(); }

  // ---- Failure

  bool Failed() const;
  // The first failure of the job, or OK.
  Status Failure() const;
  // Records the job's first failure and wakes everybody. `dead`: the rank that died, or
  // -1. Returns false if another failure was first.
  bool Fail(Code code, const std::string& text, int dead = -1);

  // Returns when all ranks that can be reached know of the failure, or after two
  // seconds. Only the driving thread may call it.
  virtual void AwaitAllKnow() {}

  // ---- Reports that one rank makes for all: each is true for the first that asks.

  // May wait a second for other hosts' accounts. Only the driving thread may call it.
  virtual bool ClaimFailureReport();
  bool ClaimGpuWarning();
  // Claims the report for the batch with this number. All ranks number batches alike.
  bool ClaimStallReport(uint64_t batch);

  // ---- The ranks

  // "rank 2 (pid 4242 on host7)".
  virtual std::string Describe(int rank) const;
  // Why a rank's process is not running, to end a sentence about it; "" if nothing is
  // known.
  virtual std::string Obstacle(int rank) const;
  // Whether a rank has left cleanly; false for those of other hosts.
  virtual bool HasShutDown(int rank) const;
  // Whether a rank of this host has died or left.
  bool HasGone(int rank) const;
  // Leaves the job cleanly and rings for everybody.
  virtual void ShutDown();
  // How a rank has left, to follow "has left the job: ". Of those of other hosts only
  // the usual is known.
  virtual std::string HowItLeft(int rank) const;
  // Says how this rank leaves, if not in the usual way. Call it before ShutDown.
  void SayHowItLeaves(const std::string& how);
  // Asks the leaders next to this rank for a sign of life, which takes a moment, and
  // those below whether their ranks' processes run; if something waits for one of them.
  virtual void AskForSigns() {}
  // Whether a leader that was asked has given none for seconds.
  virtual bool IsSilent(int) const { return false; }
  // A rank that has left cleanly and without which nothing is decided for this one: the
  // coordinator, or a leader on the way to it; -1 if there is none.
  int DepartedAbove() const;
  // Whether this rank has left or is crashing.
  bool has_departed() const;
  // How many of the coordinator's decisions a rank of this host has carried out. The
  // number stops growing when the rank leaves.
  uint64_t CarriedOut(int rank) const;
  // Whether a rank has left cleanly without carrying out the decision of this number,
  // from 1 on. Of other hosts' ranks, true for the leaders above this host only.
  virtual bool HasLeftBefore(int rank, uint64_t decision) const;
  // Counts one more for this rank. Only one thread may call it at a time.
  void NoteCarriedOut();
  virtual OperationHistory& History(int rank);
  // Whether that is known. For other hosts' ranks it is once they have told, on the
  // rank that reports the failure.
  virtual bool HasHistory(int) const { return true; }

  // ---- Waking

  // This rank's doorbell.
  Doorbell& bell() { return self_.bell; }
  // Of this rank's host: its leader, and all of its ranks.
  void RingLeader(uint32_t about = Doorbell::kEverything);
  void RingAll();
  // Wakes everybody for a failure, which nobody may sleep through.
  void WakeAll();

  // ---- The coordinator's settings for all, made before decisions that depend on them

  // Whether outputs are compared after each collective. All ranks must have the same
  // setting, or they would wait for each other.
  bool compares_outputs() const;
  void set_compares_outputs(bool compares) { Set(&header_.check, compares); }
  // Whether submissions carry the time they were made: a timeline is being written and
  // is not paused for lack of space. A separate thread sets each of the two flags.
  bool WantsTimes() const;
  void set_timeline_on(bool on) { Set(&header_.timeline_on, on); }
  void set_timeline_paused(bool paused) { Set(&header_.timeline_paused, paused); }

  // The header that the ranks of this host share.
  SegmentHeader& header() const { return header_; }

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

  // Tells the coordinator of a batch that this rank has carried out, if it leads
  // another host and submissions carry times. Only the driving thread may call it.
  virtual void TellOfBatch(BatchElsewhere) {}
  // The batches that other hosts' leaders have told the coordinator of since the last
  // call. Only the driving thread may call it.
  virtual std::vector<BatchElsewhere> TakeBatches() { return {}; }

  // Tells this rank's host, and those below, of leaders above that have left. The ranks
  // here must have the decisions made before that. Returns true if there was anything.
  // Only the driving thread may call it.
  virtual bool PassOnDepartures() { return false; }

  // Exchanges news with other hosts, without waiting. Returns true if there was any.
  // Only the driving thread may call it.
  virtual bool Poll() { return false; }
  // When to call Poll at the latest, even if nothing happens.
  virtual Clock::time_point NextPoll() const { return Clock::time_point::max(); }

 protected:
  const Topology& topology() const { return topology_; }
  // Of a rank of this host, as ProcessState has it.
  char ProcessStateOf(int rank) const;
  // The coordinator has changed one of the settings above.
  virtual void NoteSettings() {}

 private:
  void Set(std::atomic<uint32_t>* setting, bool on);
  // Of a rank of this host.
  RankBlock& block(int rank) const {
    return segment_->block(topology_.local_index(rank));
  }

  const Topology topology_;
  const std::shared_ptr<Segment> segment_;
  SegmentHeader& header_;
  RankBlock& self_;
};

}  // namespace keras_hvd
