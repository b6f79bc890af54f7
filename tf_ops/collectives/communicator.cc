#include "tf_ops/collectives/communicator.h"

#include <algorithm>
#include <utility>

#include "tf_ops/transport/faults.h"

namespace keras_hvd {

// A round's number combines its collective's number with a count. 2^28 rounds of at
// least 1 KiB are more than any tensor needs.
constexpr int kRoundBits = 28;

Communicator::Communicator(std::shared_ptr<Segment> segment, const Topology& topology,
                           Waiter* waiter)
    : segment_(std::move(segment)),
      topology_(topology),
      block_(topology.local_index(topology.rank())),
      waiter_(waiter),
      store_choice_(&segment_->block(block_).stores) {}

bool Communicator::Begin(const std::vector<int>& members, uint64_t sequence) {
  blocks_.clear();
  for (int rank : members) blocks_.push_back(topology_.local_index(rank));
  index_ = IndexOf(blocks_, block_);
  store_choice_.Follow(segment_->block(blocks_.front()).stores);
  sequence_ = sequence;
  first_round_ = round_ = sequence << kRoundBits;
  return AwaitReaders();
}

bool Communicator::BeginAgain() {
  End();
  first_round_ = ++round_;
  return AwaitReaders();
}

bool Communicator::NextRound() {
  ++round_;
  // Later rounds of a collective synchronize themselves.
  const bool first_use = round_ == first_round_ + 1;
  return !first_use || AwaitReaders();
}

bool Communicator::Regroup() {
  if (!NextRound()) return false;
  Publish();
  return AwaitAllPublished();
}

// The readers of this half in an earlier collective may still be reading.
bool Communicator::AwaitReaders() {
  const Readers& readers = readers_[Half()];
  for (int block : readers.blocks) {
    if (!Await(&RankBlock::finished, block, readers.end)) return false;
  }
  return true;
}

void Communicator::End() {
  const uint64_t end = round_ + 1;
  Advance(&RankBlock::finished, end);
  const int last = Half();
  readers_[last] = {blocks_, end};
  const bool used_both = round_ != first_round_;
  if (used_both) readers_[1 - last] = {blocks_, end};
}

// All members know the collective's number, so they agree on the half that comes first.
int Communicator::Half(int ago) const { return (sequence_ + round_ + ago) & 1; }

char* Communicator::ExchangeMemory(int member, int ago) const {
  return segment_->exchange(blocks_[member]) + Half(ago) * window_bytes();
}

void Communicator::Publish() { Advance(&RankBlock::published, round_ + 1); }

void Communicator::PublishReduced(int ago) {
  Advance(&RankBlock::reduced, round_ + 1 - ago);
}

bool Communicator::AwaitPublished(int member, int ago) {
  return Await(&RankBlock::published, blocks_[member], round_ + 1 - ago);
}

bool Communicator::AwaitAllPublished(int ago) {
  for (int member = 0; member < count(); ++member) {
    if (!AwaitPublished(member, ago)) return false;
  }
  return true;
}

bool Communicator::HasPublished(int member) const {
  const SharedCounter& published = segment_->block(blocks_[member]).published;
  return published.value.load(std::memory_order_acquire) >= round_ + 1;
}

bool Communicator::AwaitAllReduced(int ago) {
  for (int block : blocks_) {
    if (!Await(&RankBlock::reduced, block, round_ + 1 - ago)) return false;
  }
  return true;
}

bool Communicator::Await(SharedCounter RankBlock::* word, int block, uint64_t value) {
  const std::atomic<uint64_t>& progress = (segment_->block(block).*word).value;
  const auto ready = [&] { return progress.load(std::memory_order_acquire) >= value; };
  if (ready()) return true;
  Enter(CollectivePhase::kWait);
  const bool ok = waiter_->Wait(ready, topology_.local_ranks()[block]);
  Enter(CollectivePhase::kNone);
  return ok;
}

void Communicator::Advance(SharedCounter RankBlock::* word, uint64_t value) {
  FaultPoint();
  (segment_->block(block_).*word).value.store(value, std::memory_order_release);
  for (int block : blocks_) {
    if (block != block_) segment_->block(block).bell.Ring(Doorbell::kProgress);
  }
}

}  // namespace keras_hvd
