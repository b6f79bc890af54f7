#include "tf_ops/engine/leader_service.h"

#include <string>
#include <utility>
#include <variant>

namespace keras_hvd {

LeaderService::LeaderService(const World& world, size_t cache_capacity)
    : job_(world.job),
      ranks_(world.topology.ranks_below(world.topology.host())),
      merger_(ranks_),
      reader_(world,
              {[this](MergedSubmission submission) {
                 uses_gpus_ |= submission.description->on_gpu;
                 merger_.Submit(std::move(submission));
               },
               [this](const SubmissionRun& run) { merger_.Submit(run); },
               [this, topology = world.topology](const RankDeparture& departure) {
                 merger_.Leave(departure);
                 if (topology.is_local(departure.rank)) {
                   local_->Drop(topology.local_index(departure.rank));
                 }
               }}),
      encoder_(cache_capacity),
      decoder_(job_->size()),
      above_(world.channels->ToAbove()),
      from_above_(world.channels->FromAbove()),
      local_(world.channels->ToRanks()),
      below_(world.channels->ToBelow()) {
  std::vector<int> all(job_->size());
  for (int rank = 0; rank < job_->size(); ++rank) all[rank] = rank;
  merger_.AddProcessSet(0, std::move(all));
}

bool LeaderService::HasNews() const {
  return reader_.HasNews() || (!leaves_ && from_above_->HasNews()) ||
         local_->CanFlush();
}

bool LeaderService::Poll() {
  // The leader above must hear of departures before the answer.
  const bool has_answer = HasAnswer();
  bool progressed = reader_.Read();
  progressed |= PassUp();
  if (has_answer) job_->AnswerAbove();
  if (PassDown()) {
    // The submissions held for a process set are passed on when it is removed.
    PassUp();
    progressed = true;
  }
  if (!local_->has_unsent()) progressed |= job_->PassOnDepartures();
  return progressed;
}

// That this rank leaves is an answer, too.
bool LeaderService::HasAnswer() {
  const uint64_t asked_about = job_->AskedAbout();
  return asked_about > 0 && !leaves_ && job_->Behind(asked_about).empty();
}

bool LeaderService::PassUp() {
  passed_.clear();
  for (Upward message; merger_.Next(&message);) passed_.push_back(std::move(message));
  if (passed_.empty()) return false;
  const Clock::time_point now = Clock::now();
  for (size_t next = 0; next < passed_.size();) {
    above_->Queue(encoder_.Encode(passed_, &next, now));
  }
  above_->Flush();
  return true;
}

bool LeaderService::PassDown() {
  const bool has_decisions = !leaves_ && from_above_->Receive();
  if (!has_decisions && !local_->CanFlush()) return false;
  std::string_view message;
  while (has_decisions && from_above_->Next(&message)) {
    const Status status = Note(message);
    if (!status.ok()) {
      job_->Fail(status.code, job_->Describe(JobState::kCoordinator) +
                                  " has sent rank " + std::to_string(job_->rank()) +
                                  " a decision that is malformed: " + status.message +
                                  ". This is a bug in keras_hvd");
      return true;
    }
    passed_down_ += 1;
    local_->Queue(message);
    if (below_ != nullptr) below_->Queue(message);
  }
  if (below_ != nullptr) below_->Flush();
  if (local_->Flush()) job_->RingAll();
  return true;
}

// The merger must know of a decision before the ranks below act on it.
Status LeaderService::Note(std::string_view decision) {
  const Status status = decoder_.Decode(decision, &decision_);
  if (const auto* agree = std::get_if<AgreeMessage>(&decision_)) {
    if (agree->kind == Kind::kJoin) {
      merger_.EndJoin(ranks_);
    } else if (agree->kind == Kind::kAddProcessSet) {
      merger_.AddProcessSet(agree->answer, agree->members);
    } else {
      merger_.RemoveProcessSet(agree->answer);
    }
  } else if (const auto* fail = std::get_if<FailMessage>(&decision_)) {
    if (fail->tensor.name == kJoinName) merger_.EndJoin(fail->ranks);
  } else if (const auto* run = std::get_if<RunMessage>(&decision_)) {
    // Ranks may take part that never had anything to submit.
    for (const auto& zeros : run->zeros) uses_gpus_ |= zeros.description->on_gpu;
  }
  return status;
}

void LeaderService::PassOnOld() {
  merger_.PassOnOld();
  PassUp();
}

void LeaderService::BeginToLeave() {
  Poll();
  leaves_ = true;
  merger_.Leave({job_->rank(), static_cast<int64_t>(job_->CarriedOut(job_->rank()))});
  PassUp();
}

std::vector<int> LeaderService::NeededBy() {
  return uses_gpus_ ? job_->Behind(passed_down_) : std::vector<int>();
}

void LeaderService::Leave() {
  Poll();
  for (int rank : ranks_) {
    // They will not hear of later decisions.
    if (rank != job_->rank()) merger_.Leave({rank, passed_down_, job_->rank()});
  }
  PassUp();
}

}  // namespace keras_hvd
