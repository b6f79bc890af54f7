// See communicator.h.
#include "tf_ops/collectives/communicator.h"

#include <algorithm>
#include <utility>

#include "tf_ops/transport/faults.h"

namespace keras_hvd {
namespace {

// A round's number combines its collective's number with a count. 2^28 rounds of at
// least 1 KiB are more than any tensor needs.
constexpr int kRoundBits = 28;

}  // namespace

Communicator::Communicator(std::shared_ptr<Segment> segment, int rank, Waiter* waiter)
    : segment_(std::move(segment)), rank_(rank), waiter_(waiter) {}

bool Communicator::Begin(const std::vector<int>& members, uint64_t sequence) {
  members_ = members;
  index_ = static_cast<int>(std::lower_bound(members_.begin(), members_.end(), rank_) -
                            members_.begin());
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

// The readers of this half in an earlier collective may still be reading.
bool Communicator::AwaitReaders() {
  const Readers& readers = readers_[Half()];
  for (int rank : readers.ranks) {
    if (!Await(&RankBlock::finished, rank, readers.end)) return false;
  }
  return true;
}

void Communicator::End() {
  const uint64_t end = round_ + 1;
  Advance(&RankBlock::finished, end);
  const int last = Half();
  readers_[last] = {members_, end};
  const bool used_both = round_ != first_round_;
  if (used_both) readers_[1 - last] = {members_, end};
}

// All members know the collective's number, so they agree on the half that comes first.
int Communicator::Half(int ago) const { return (sequence_ + round_ + ago) & 1; }

char* Communicator::ExchangeMemory(int member, int ago) const {
  return segment_->exchange(members_[member]) + Half(ago) * window_bytes();
}

void Communicator::Publish() { Advance(&RankBlock::published, round_ + 1); }

void Communicator::PublishReduced() { Advance(&RankBlock::reduced, round_ + 1); }

bool Communicator::AwaitPublished(int member, int ago) {
  return Await(&RankBlock::published, members_[member], round_ + 1 - ago);
}

bool Communicator::AwaitAllPublished(int ago) {
  for (int member = 0; member < count(); ++member) {
    if (!AwaitPublished(member, ago)) return false;
  }
  return true;
}

bool Communicator::HasPublished(int member) const {
  const SharedCounter& published = segment_->block(members_[member]).published;
  return published.value.load(std::memory_order_acquire) >= round_ + 1;
}

bool Communicator::AwaitAllReduced() {
  for (int rank : members_) {
    if (!Await(&RankBlock::reduced, rank, round_ + 1)) return false;
  }
  return true;
}

bool Communicator::Await(SharedCounter RankBlock::* word, int rank, uint64_t value) {
  const std::atomic<uint64_t>& progress = (segment_->block(rank).*word).value;
  const auto ready = [&] { return progress.load(std::memory_order_acquire) >= value; };
  if (ready()) return true;
  Enter(CollectivePhase::kWait);
  const bool ok = waiter_->Wait(ready, rank);
  Enter(CollectivePhase::kNone);
  return ok;
}

void Communicator::Advance(SharedCounter RankBlock::* word, uint64_t value) {
  BeforeStore();
  (segment_->block(rank_).*word).value.store(value, std::memory_order_release);
  for (int rank : members_) {
    if (rank != rank_) segment_->block(rank).bell.Ring(Doorbell::kProgress);
  }
}

}  // namespace keras_hvd
