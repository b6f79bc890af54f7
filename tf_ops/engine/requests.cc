#include "tf_ops/engine/requests.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "tf_ops/operation/inline_tensors.h"
#include "tf_ops/operation/log.h"
#include "tf_ops/transport/threads.h"

namespace keras_hvd {

Requests::Requests(const World& world, const EngineOptions& options,
                   EngineCounters* counters)
    : job_(world.job),
      rank_(job_->rank()),
      most_inline_bytes_(MostInlineBytes(job_->size(), world.topology.hosts())),
      counters_(*counters),
      process_sets_(rank_, job_->size(), options.last_earlier_set),
      encoder_(options.cache_capacity),
      submissions_(world.channels->ToLeader()),
      log_(&job_->History(rank_)) {}

Status Requests::Submit(std::unique_ptr<Operation> operation) {
  const std::shared_ptr<const Description> description = operation->description;
  if (LogEnabled(LogLevel::kTrace)) {
    Log(rank_, LogLevel::kTrace, "submits " + Title(*description));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (!refusal_.ok()) {
    return {refusal_.code, Title(*description) + " failed on rank " +
                               std::to_string(rank_) + ": " + refusal_.message};
  }
  KHVD_RETURN_IF_ERROR(Check(*description));
  SameName& same_name = pending_[KeyOf(*description)];
  const bool duplicate =
      !same_name.empty() && same_name.back()->submitter != operation->submitter;
  const size_t members = process_sets_.MembersOf(description->process_set).size();
  const bool inlined =
      !duplicate && TravelsInline(*description, members, most_inline_bytes_);
  operation->submitted = Clock::now();
  std::optional<Clock::time_point> time;
  if (job_->WantsTimes()) time = operation->submitted;
  operation->log_number = log_.Add(*description);
  same_name.push_back(std::move(operation));
  pending_count_ += 1;
  const Operation* given = inlined ? same_name.back().get() : nullptr;
  try {
    submissions_->Queue(encoder_.Encode(*description, duplicate, time, given));
    submissions_->Flush();
  } catch (const std::exception& error) {
    // Half of it may have been encoded, or have gone out.
    same_name.pop_back();
    pending_count_ -= 1;
    const Status status = StatusOf(error);
    job_->Fail(status.code, "rank " + std::to_string(rank_) + " cannot submit " +
                                Title(*description) + ": " + status.message);
    return status;
  }
  return Status::Ok();
}

// Refuses requests that the peers must never wait for.
Status Requests::Check(const Description& description) const {
  KHVD_RETURN_IF_ERROR(process_sets_.Check(description));
  if (description.kind == Kind::kJoin && pending_.count(KeyOf(description)) != 0) {
    return Status::InvalidArgument("join() failed: rank " + std::to_string(rank_) +
                                   " has joined already, in another thread");
  }
  return Status::Ok();
}

Status Requests::MembersOf(int32_t process_set, std::vector<int>* ranks) {
  std::lock_guard<std::mutex> lock(mutex_);
  return process_sets_.Find(process_set, ranks);
}

bool Requests::FlushSubmissions() {
  bool flushed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    flushed = submissions_->Flush();
  }
  if (flushed) job_->RingLeader();
  return flushed;
}

std::unique_ptr<Operation> Requests::Take(const TensorKey& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pending_.find(key);
  if (found == pending_.end()) return nullptr;
  std::unique_ptr<Operation> operation = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) pending_.erase(found);
  pending_count_ -= 1;
  return operation;
}

Clock::time_point Requests::OldestPending() {
  Clock::time_point oldest = Clock::time_point::max();
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [key, same_name] : pending_) {
    oldest = std::min(oldest, same_name.front()->submitted);
  }
  return oldest;
}

void Requests::NoteJoined(Operation* operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  operation->log_number = log_.Add(*operation->description);
}

void Requests::NoteRunning(const Batch& batch) {
  for (const auto& operation : batch) {
    std::lock_guard<std::mutex> lock(mutex_);
    log_.Update(operation->log_number, Phase::kRunning);
  }
}

void Requests::End(std::unique_ptr<Operation> operation, const Status& status) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    log_.Update(operation->log_number, status.ok() ? Phase::kDone : Phase::kFailed);
  }
  counters_.tensors += 1;
  counters_.bytes += operation->input_bytes();
  if (operation->ending == nullptr) return operation->done(status);
  Ending& ending = *operation->ending;
  ending.status = status;
  ending.ended.store(true);
  if (ending.claimed.exchange(true)) operation->done(status);
}

void Requests::EndAll(Code code, const std::string& reason) {
  std::unordered_map<TensorKey, SameName, TensorKeyHash> ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (refusal_.ok() || code == Code::kShutDown) refusal_ = {code, reason};
    ended.swap(pending_);
    pending_count_ = 0;
  }
  for (auto& [key, same_name] : ended) {
    for (auto& operation : same_name) {
      const std::string title = Title(*operation->description);
      End(std::move(operation),
          {code, title + " failed on rank " + std::to_string(rank_) + ": " + reason});
    }
  }
}

void Requests::AddProcessSet(int32_t id, std::vector<int> members) {
  std::lock_guard<std::mutex> lock(mutex_);
  process_sets_.Add(id, std::move(members));
}

void Requests::RemoveProcessSet(int32_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  process_sets_.Remove(id);
}

}  // namespace keras_hvd
