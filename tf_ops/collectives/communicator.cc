// See communicator.h.
#include "tf_ops/collectives/communicator.h"

#include <algorithm>
#include <utility>

namespace keras_hvd {
namespace {

// A round's number is its collective's number and a count; 2^28 rounds of at least
// 1 KiB are more than any tensor needs.
constexpr int kRoundBits = 28;

}  // namespace

Communicator::Communicator(std::shared_ptr<Segment> segment, int rank, Waiter* waiter)
    : segment_(std::move(segment)), rank_(rank), waiter_(waiter) {}

bool Communicator::Begin(const std::vector<int>& members, uint64_t sequence) {
  // Those that read this rank's memory in its last collective may still do so.
  for (int rank : previous_members_) {
    if (!Await(&RankBlock::finished, rank, previous_end_)) return false;
  }
  members_ = members;
  index_ = static_cast<int>(std::lower_bound(members_.begin(), members_.end(), rank_) -
                            members_.begin());
  first_round_ = sequence << kRoundBits;
  round_ = first_round_;
  return true;
}

void Communicator::End() {
  Announce(&RankBlock::finished, first_round_ + 1);
  previous_end_ = first_round_ + 1;
  std::swap(previous_members_, members_);
}

char* Communicator::Exchange(int member) const {
  const int64_t half = (round_ & 1) * exchange_bytes();
  return segment_->exchange(members_[member]) + half;
}

void Communicator::Publish() { Announce(&RankBlock::published, round_ + 1); }

void Communicator::PublishReduced() { Announce(&RankBlock::reduced, round_ + 1); }

bool Communicator::AwaitPublished(int member, int ago) {
  return Await(&RankBlock::published, members_[member], round_ + 1 - ago);
}

bool Communicator::AwaitAllPublished(int ago) {
  for (int member = 0; member < count(); ++member) {
    if (!AwaitPublished(member, ago)) return false;
  }
  return true;
}

bool Communicator::AwaitAllReduced() {
  for (int rank : members_) {
    if (!Await(&RankBlock::reduced, rank, round_ + 1)) return false;
  }
  return true;
}

bool Communicator::Await(Progress RankBlock::* word, int rank, uint64_t value) {
  const std::atomic<uint64_t>& progress = (segment_->block(rank).*word).value;
  const auto ready = [&] { return progress.load(std::memory_order_acquire) >= value; };
  return ready() || waiter_->Wait(ready, rank);
}

void Communicator::Announce(Progress RankBlock::* word, uint64_t value) {
  (segment_->block(rank_).*word).value.store(value, std::memory_order_release);
  for (int rank : members_) {
    if (rank != rank_) segment_->block(rank).bell.Ring();
  }
}

}  // namespace keras_hvd
