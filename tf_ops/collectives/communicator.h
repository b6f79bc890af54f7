// One rank's view of the ranks that take part in a collective on its host.
//
// A collective runs in rounds. In each round, a rank writes into its own exchange
// memory, publishes the round's number, and reads the others' published data. Numbers
// only grow, across all collectives, so no word is ever reset.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tf_ops/collectives/phase_recorder.h"
#include "tf_ops/collectives/store_choice.h"
#include "tf_ops/transport/segment.h"
#include "tf_ops/transport/topology.h"

namespace keras_hvd {

// Passes the engine's time until a peer is ready.
class Waiter {
 public:
  virtual ~Waiter() = default;
  // Returns true as soon as `ready()` is true, or false when the job has failed or
  // stops. `awaited` is the rank being waited for.
  virtual bool Wait(const std::function<bool()>& ready, int awaited) = 0;
  // The same where nothing rings when `ready()` becomes true. Asks again and again,
  // ever less often.
  virtual bool Poll(const std::function<bool()>& ready, int awaited) = 0;
  // Passes a moment while waiting for something that rings for nobody. `times` counts
  // the moments passed so far. Returns false when the job has failed or stops.
  virtual bool Pause(int64_t times) = 0;
};

class Communicator {
 public:
  // The segment has a block for each rank of this host.
  Communicator(std::shared_ptr<Segment> segment, const Topology& topology,
               Waiter* waiter);

  // Starts a collective of `members` (ranks of this host, ascending, including this
  // one). `sequence` numbers the collectives that this rank takes part in, the same on
  // all members. Returns false if the job has failed.
  bool Begin(const std::vector<int>& members, uint64_t sequence);
  void End();
  // Ends the current collective and begins another one with the same members.
  bool BeginAgain();

  int count() const { return static_cast<int>(blocks_.size()); }
  // This rank's index among the members.
  int index() const { return index_; }

  // The half of a member's exchange memory for the current round, or for the one `ago`
  // before. Halves alternate, across collectives too, so a rank may write one round
  // while others still read the one before.
  char* ExchangeMemory(int member, int ago = 0) const;
  int64_t window_bytes() const { return segment_->exchange_bytes() / 2; }

  // Returns false if the job has failed.
  bool NextRound();
  // An empty round: after it no member reads the others' earlier data.
  bool Regroup();
  // Tells the members that this rank's part of the round can be read.
  void Publish();
  // The same for the second half of a round, the reduced results, of this round or the
  // one `ago` before.
  void PublishReduced(int ago = 0);
  // Waits until a member, or all, have published this round or the one `ago` before.
  bool AwaitPublished(int member, int ago = 0);
  bool AwaitAllPublished(int ago = 0);
  // Whether this rank already sees that a member has published this round.
  bool HasPublished(int member) const;
  bool AwaitAllReduced(int ago = 0);

  // The choice for these members.
  StoreChoice& store_choice() { return store_choice_; }

  // Records the collectives from now on; null stops the record.
  void set_recorder(PhaseRecorder* recorder) { recorder_ = recorder; }
  // Enters a phase in the record (see phase_recorder.h). Waits record themselves. Free
  // without a recorder.
  void Enter(CollectivePhase phase, int64_t begin = 0, int64_t end = INT64_MAX) {
    if (recorder_ != nullptr) recorder_->Enter(phase, begin, end);
  }

 private:
  // The ranks that may still read a half of this rank's memory, and the value that
  // their `finished` will have when they no longer do.
  struct Readers {
    std::vector<int> blocks;
    uint64_t end = 0;
  };

  int Half(int ago = 0) const;
  bool AwaitReaders();
  // `block`: the local index of a rank, which is that of its block in the segment.
  bool Await(SharedCounter RankBlock::* word, int block, uint64_t value);
  void Advance(SharedCounter RankBlock::* word, uint64_t value);

  const std::shared_ptr<Segment> segment_;
  const Topology topology_;
  const int block_;  // this rank's
  Waiter* const waiter_;
  PhaseRecorder* recorder_ = nullptr;
  StoreChoice store_choice_;
  std::vector<int> blocks_;  // the members'
  int index_ = 0;
  uint64_t sequence_ = 0;
  uint64_t first_round_ = 0;
  uint64_t round_ = 0;
  Readers readers_[2];
};

}  // namespace keras_hvd
