// See leader_service.h.
#include "tf_ops/engine/leader_service.h"

#include <utility>

namespace keras_hvd {

LeaderService::LeaderService(const World& world, size_t cache_capacity)
    : job_(world.job),
      ranks_(world.topology.ranks_below(world.topology.host())),
      merger_(ranks_),
      reader_(world, {[this](MergedSubmission submission) {
                        merger_.Submit(std::move(submission));
                      },
                      [this, topology = world.topology](int rank) {
                        merger_.Leave(rank);
                        if (topology.is_local(rank)) {
                          local_->Drop(topology.local_index(rank));
                        }
                      }}),
      encoder_(cache_capacity),
      above_(world.channels->ToAbove()),
      from_above_(world.channels->FromAbove()),
      local_(world.channels->ToRanks()),
      below_(world.channels->ToBelow()) {
  std::vector<int> all(job_->size());
  for (int rank = 0; rank < job_->size(); ++rank) all[rank] = rank;
  merger_.AddProcessSet(0, std::move(all));
}

bool LeaderService::HasNews() const {
  return reader_.HasNews() || from_above_->HasNews() || local_->CanFlush();
}

bool LeaderService::Poll() {
  bool progressed = reader_.Read();
  progressed |= PassUp();
  progressed |= PassDown();
  return progressed;
}

bool LeaderService::PassUp() {
  Upward message;
  bool passed = false;
  for (; merger_.Next(&message); passed = true) {
    above_->Queue(encoder_.Encode(message, Clock::now()));
  }
  if (passed) above_->Flush();
  return passed;
}

bool LeaderService::PassDown() {
  if (!from_above_->Receive() && !local_->CanFlush()) return false;
  std::string_view message;
  while (from_above_->Next(&message)) {
    local_->Queue(message);
    if (below_ != nullptr) below_->Queue(message);
  }
  if (below_ != nullptr) below_->Flush();
  if (local_->Flush()) job_->RingAll();
  return true;
}

void LeaderService::PassOnOld() {
  merger_.PassOnOld();
  PassUp();
}

void LeaderService::NoteAgreed(const AgreeMessage& agree) {
  switch (agree.kind) {
    case Kind::kAddProcessSet:
      return merger_.AddProcessSet(agree.answer, agree.members);
    case Kind::kRemoveProcessSet:
      return merger_.RemoveProcessSet(agree.answer);
    default:
      return merger_.EndJoin(ranks_);
  }
}

void LeaderService::NoteFailed(const FailMessage& fail) {
  if (fail.tensor.name == kJoinName) merger_.EndJoin(fail.ranks);
}

void LeaderService::Leave() {
  Poll();
  for (int rank : ranks_) merger_.Leave(rank);
  PassUp();
}

}  // namespace keras_hvd
