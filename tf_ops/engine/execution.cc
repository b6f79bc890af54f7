#include "tf_ops/engine/execution.h"

#include <algorithm>
#include <variant>

#include "tf_ops/engine/job_failure.h"
#include "tf_ops/operation/log.h"
#include "tf_ops/transport/threads.h"

namespace keras_hvd {
namespace {

void LogBatch(int rank, uint64_t number, const Batch& batch) {
  std::string text = "runs batch " + std::to_string(number) + ": " +
                     Title(*batch.front()->description);
  if (batch.size() > 1) text += " and " + std::to_string(batch.size() - 1) + " more";
  Log(rank, LogLevel::kDebug,
      text + ", " + std::to_string(InputBytes(batch)) + " bytes");
}

// Gives an operation zeros as its tensors; the results replace them.
void AllocateZeros(Operation* operation) {
  const auto lines = [](const TensorDescription& tensor) {
    const size_t bytes = Elements(tensor) * Bytes(tensor.dtype);
    return (bytes + sizeof(Operation::Line) - 1) / sizeof(Operation::Line);
  };
  const std::vector<TensorDescription>& tensors = operation->description->tensors;
  size_t needed = 0;
  for (const TensorDescription& tensor : tensors) needed += lines(tensor);
  operation->zeros.resize(needed);
  Operation::Line* line = operation->zeros.data();
  for (const TensorDescription& tensor : tensors) {
    operation->buffers.push_back({line, line});
    line += lines(tensor);
  }
}

}  // namespace

Execution::Execution(const EngineOptions& options, const World& world,
                     std::shared_ptr<GpuAccess> gpu, Waiter* waiter, Requests* requests,
                     SpinPolicy* spin_policy, Timeline* timeline,
                     EngineCounters* counters)
    : job_(world.job),
      rank_(job_->rank()),
      requests_(*requests),
      spin_policy_(*spin_policy),
      counters_(*counters),
      runner_(options, world, std::move(gpu), waiter, timeline),
      decisions_(world.channels->FromLeader()),
      decoder_(job_->size()) {
  const Topology& topology = world.topology;
  for (int host = topology.host(); host >= 0; host = topology.parent_of(host)) {
    errors_above_[topology.leader_of(host)];
  }
}

// ---- Decisions

bool Execution::Read() {
  if (!decisions_->Receive()) return false;
  spin_policy_.NoteDecision();
  std::string_view message;
  while (decisions_->Next(&message)) to_do_.emplace_back(message);
  return true;
}

void Execution::CarryOutNext() {
  std::string message;
  DecisionMessage decision;
  if (TakeNext(&message, &decision)) CarryOut(decision);
}

bool Execution::CarryOutRest() {
  std::string message;
  DecisionMessage decision;
  while (anything_to_do()) {
    if (!TakeNext(&message, &decision) || NeedsThisRank(decision)) return false;
    CarryOut(decision);
  }
  return true;
}

// The decision refers to the message. Returns false if the job has failed.
bool Execution::TakeNext(std::string* message, DecisionMessage* decision) {
  *message = std::move(to_do_.front());
  to_do_.pop_front();
  const Status status = decoder_.Decode(*message, decision);
  if (!status.ok()) {
    job_->Fail(status.code,
               job_->Describe(JobState::kCoordinator) + " has sent rank " +
                   std::to_string(rank_) +
                   " a decision that is malformed: " + status.message +
                   ". This is a bug in keras_hvd, or memory was overwritten");
  }
  return status.ok();
}

// Whether others may wait for this rank to take part.
bool Execution::NeedsThisRank(const DecisionMessage& decision) const {
  if (const auto* agree = std::get_if<AgreeMessage>(&decision)) {
    return agree->kind == Kind::kAddProcessSet;
  }
  const auto* run = std::get_if<RunMessage>(&decision);
  if (run == nullptr || run->results.has_value()) return false;
  const std::vector<int>& members =
      requests_.process_sets().MembersOf(run->tensors.front().process_set);
  return Contains(members, rank_);
}

void Execution::CarryOut(const DecisionMessage& decision) {
  std::visit([this](const auto& each) { CarryOut(each); }, decision);
  job_->NoteCarriedOut();
}

void Execution::CarryOut(const FailMessage& fail) {
  for (auto& [leader, error] : errors_above_) {
    if (Contains(fail.ranks, leader)) error = fail.text;
  }
  if (!Contains(fail.ranks, rank_)) return;
  std::unique_ptr<Operation> operation = requests_.Take(fail.tensor);
  if (operation == nullptr) return;
  const Code code = fail.departed ? Code::kRankFailed : Code::kMismatch;
  const std::string title = Title(*operation->description);
  requests_.End(
      std::move(operation),
      {code, title + " failed on rank " + std::to_string(rank_) + ": " + fail.text});
}

void Execution::CarryOut(const AgreeMessage& agree) {
  if (agree.kind == Kind::kAddProcessSet) {
    // The job's failure ends the request.
    if (!AddProcessSet(agree.answer, agree.members)) return;
  } else if (agree.kind == Kind::kRemoveProcessSet) {
    if (!gpu().RemoveProcessSet(agree.answer)) return;
    requests_.RemoveProcessSet(agree.answer);
  }
  some_go_without_ = requests_.process_sets().HasOneWithoutThisRank();
  std::unique_ptr<Operation> operation = requests_.Take(agree.tensor);
  if (operation == nullptr) return;
  if (operation->answer != nullptr) *operation->answer = agree.answer;
  requests_.End(std::move(operation), Status::Ok());
}

// All ranks count this as a batch. It is one if a communicator is made for the set.
bool Execution::AddProcessSet(int32_t id, const std::vector<int>& members) {
  sequence_ += 1;
  running_ = "the addition of process set " + std::to_string(id);
  const bool ok = runner_.AddProcessSet(
      id, members, requests_.process_sets().MembersOf(0), sequence_, tuning_);
  running_.clear();
  if (ok) requests_.AddProcessSet(id, members);
  return ok;
}

// Decisions have one order, so all ranks change this between the same batches.
void Execution::CarryOut(const TuneMessage& tune) {
  tuning_ = tune.tuning;
  counters_.tunings += 1;
  if (observer_.tuned) observer_.tuned();
}

// ---- Batches

// All ranks count all batches, so ranks that share a batch agree on its number.
void Execution::CarryOut(const RunMessage& run) {
  sequence_ += 1;
  for (const Decision::Zeros& zeros : run.zeros) {
    if (Contains(zeros.ranks, rank_)) TakePartWithZeros(zeros);
  }
  const std::vector<int>& members =
      requests_.process_sets().MembersOf(run.tensors.front().process_set);
  // A leader that goes on after an error does not leave because of it.
  for (auto& [leader, error] : errors_above_) {
    if (Contains(members, leader)) error.clear();
  }
  if (!Contains(members, rank_)) return;
  Batch batch;
  if (!TakeBatch(run.tensors, &batch)) return EndBatch(std::move(batch), false);
  running_ = Title(*batch.front()->description);
  counters_.batches += 1;
  if (LogEnabled(LogLevel::kDebug)) LogBatch(rank_, sequence_, batch);
  requests_.NoteRunning(batch);
  const bool ok = Run(batch, members, run);
  running_.clear();
  if (ok && observer_.ran && batch.front()->description->kind == Kind::kAllreduce) {
    observer_.ran(run.tensors, InputBytes(batch));
  }
  EndBatch(std::move(batch), ok);
}

// The peers are in the same batch: without memory for it, the job fails.
bool Execution::Run(const Batch& batch, const std::vector<int>& members,
                    const RunMessage& run) {
  try {
    return runner_.Run(batch, members, sequence_, tuning_, run.results);
  } catch (const std::exception& error) {
    job_->Fail(Code::kInternal, job_->Describe(rank_) + " cannot go on with " +
                                    running_ + ": " + StatusOf(error).message);
    return false;
  }
}

// This rank has joined and takes part in the batch with zeros.
void Execution::TakePartWithZeros(const Decision::Zeros& zeros) {
  auto operation = std::make_unique<Operation>();
  operation->description = zeros.description;
  operation->done = [](const Status&) {};
  if (!operation->description->on_gpu) AllocateZeros(operation.get());
  requests_.NoteJoined(operation.get());
  zeros_[KeyOf(*zeros.description)] = std::move(operation);
}

// Takes the operations to run. Ends the job if one is missing or does not belong there.
bool Execution::TakeBatch(const std::vector<TensorKey>& keys, Batch* batch) {
  batch->reserve(keys.size());
  for (const TensorKey& key : keys) {
    std::unique_ptr<Operation> operation = Take(key);
    if (operation == nullptr) {
      job_->Fail(Code::kInternal,
                 "rank " + std::to_string(rank_) + " was told to run " +
                     Quoted(key.name) +
                     ", which it has not submitted. This is a bug in keras_hvd");
      return false;
    }
    batch->push_back(std::move(operation));
    const Description& first = *batch->front()->description;
    const Description& last = *batch->back()->description;
    if (batch->size() == 1 || CanFuse(first, last)) continue;
    job_->Fail(Code::kInternal, "rank " + std::to_string(rank_) +
                                    " was told to run as one " + Title(first) +
                                    " and " + Title(last) +
                                    ". This is a bug in keras_hvd");
    return false;
  }
  return true;
}

// The operation that the rank has submitted under the name, or zeros in its place.
std::unique_ptr<Operation> Execution::Take(const TensorKey& key) {
  const auto zeros = zeros_.find(key);
  if (zeros == zeros_.end()) return requests_.Take(key);
  std::unique_ptr<Operation> operation = std::move(zeros->second);
  zeros_.erase(zeros);
  return operation;
}

void Execution::EndBatch(Batch batch, bool ok) {
  // Report first: a program that gets the error may end before anyone else says more.
  if (!ok) ReportFailureOnce(job_.get());
  for (auto& operation : batch) {
    const Status status = OutcomeOf(*operation, ok);
    requests_.End(std::move(operation), status);
  }
}

Status Execution::OutcomeOf(const Operation& operation, bool ok) const {
  if (ok && !operation.out_of_memory) return Status::Ok();
  const std::string title = Title(*operation.description);
  const std::string rank = "rank " + std::to_string(rank_);
  if (ok) {
    return Status::Internal(title + ": there is no memory for the result on " + rank);
  }
  const Status reason = ReasonOfEnd(*job_);
  return {reason.code, title + " failed on " + rank + ": " + reason.message};
}

}  // namespace keras_hvd
