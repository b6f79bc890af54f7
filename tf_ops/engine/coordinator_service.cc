#include "tf_ops/engine/coordinator_service.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "tf_ops/coordination/autotune_log.h"
#include "tf_ops/operation/description.h"
#include "tf_ops/operation/log.h"

namespace keras_hvd {
namespace {

std::string SecondsText(double seconds) {
  char text[32];
  snprintf(text, sizeof(text), "%.0f s", seconds);
  return text;
}

std::unique_ptr<SubmissionMerger> MergerOf(const Topology& topology) {
  if (topology.hosts() == 1) return nullptr;
  std::vector<int> all = topology.ranks_below(topology.host());
  auto merger = std::make_unique<SubmissionMerger>(all);
  merger->AddProcessSet(0, all);
  return merger;
}

}  // namespace

CoordinatorService::CoordinatorService(const World& world, int64_t fusion_bytes,
                                       size_t cache_capacity, Timeline* timeline)
    : job_(world.job),
      topology_(world.topology),
      timeline_(*timeline),
      coordinator_(job_->size(), fusion_bytes),
      merger_(MergerOf(topology_)),
      reader_(world, Listener()),
      encoder_(cache_capacity, topology_.host_of_ranks()),
      decisions_(world.channels->ToRanks()),
      below_(world.channels->ToBelow()) {}

bool CoordinatorService::HasNews() const {
  return reader_.HasNews() || decisions_->CanFlush();
}

bool CoordinatorService::Poll() {
  coordinator_.set_wants_times(timeline_.WantsTimes());
  now_ = Seconds(Clock::now().time_since_epoch());
  bool progressed = reader_.Read();
  for (const BatchElsewhere& batch : job_->TakeBatches()) {
    timeline_.AddBatchElsewhere(batch);
  }
  progressed |= Decide();
  return progressed;
}

// Sends the decisions that can be made now. Returns true if there was anything.
bool CoordinatorService::Decide() {
  Decision decision;
  bool decided = false;
  TakeMerged();
  while (!leaves_ && coordinator_.Next(&decision)) {
    WriteDecision(decision);
    decided = true;
    // The submissions held for a process set are passed on when it is removed.
    TakeMerged();
  }
  if (decided) timeline_.AddCycle();
  return Send();
}

void CoordinatorService::BeginToLeave() {
  if (topology_.hosts() == 1) return;
  Poll();
  leaves_ = true;
}

void CoordinatorService::Leave() {
  if (topology_.hosts() == 1) return;
  Poll();
  // Those whose leader has left do not hear from this rank either.
  const int rank = job_->rank();
  CheckRuns({rank, static_cast<int64_t>(job_->CarriedOut(rank))});
}

std::vector<int> CoordinatorService::NeededBy() {
  return uses_gpus_ ? job_->Behind(queued_) : std::vector<int>();
}

bool CoordinatorService::Send() {
  // First: these have the longer way.
  if (below_ != nullptr) below_->Flush();
  if (!decisions_->Flush()) return false;
  job_->RingAll();
  return true;
}

SubmissionReader::Listener CoordinatorService::Listener() {
  if (merger_ == nullptr) {
    return {[this](MergedSubmission submission) { Submit(std::move(submission)); },
            nullptr, [this](const RankDeparture& departure) { Leave(departure); }};
  }
  return {
      [this](MergedSubmission submission) { merger_->Submit(std::move(submission)); },
      [this](const SubmissionRun& run) { merger_->Submit(run); },
      [this](const RankDeparture& departure) { merger_->Leave(departure); }};
}

void CoordinatorService::TakeMerged() {
  if (merger_ == nullptr) return;
  for (Upward message; merger_->Next(&message);) {
    if (const auto* departure = std::get_if<RankDeparture>(&message)) {
      Leave(*departure);
    } else {
      Submit(std::get<MergedSubmission>(std::move(message)));
    }
  }
}

void CoordinatorService::Submit(MergedSubmission submission) {
  anything_waits_ = true;
  uses_gpus_ |= submission.description->on_gpu;
  coordinator_.Submit(std::move(submission), now_);
}

void CoordinatorService::Leave(const RankDeparture& departure) {
  const int rank = departure.rank;
  // A leader that leaves tells of all below it, also of those that have left before.
  if (!departures_.emplace(rank, departure).second) return;
  CheckRuns(departure);
  if (topology_.is_local(rank)) decisions_->Drop(topology_.local_index(rank));
  coordinator_.Leave(
      rank, HowItLeft(departure, "") + ": " +
                (departure.how.empty() ? JobState::kUsualWayToLeave : departure.how));
}

// `what`: the work that it has not done, as in " before it ran ...".
std::string CoordinatorService::HowItLeft(const RankDeparture& departure,
                                          const std::string& what) const {
  const std::string rank = job_->Describe(departure.rank);
  if (departure.leader < 0) return rank + " has left the job" + what;
  return rank + " was cut off from rank 0" + what + ": " +
         job_->Describe(departure.leader) + ", between them, has left the job";
}

void CoordinatorService::CheckRuns(const RankDeparture& departure) {
  for (const auto& [process_set, last] : last_gpu_runs_) CheckRun(last, departure);
}

// A rank that waits for it on a GPU sees its departure only on the same host.
void CoordinatorService::CheckRun(const LastRun& last, const RankDeparture& departure) {
  if (last.decision <= departure.carried_out || !last.members.Has(departure.rank)) {
    return;
  }
  job_->Fail(Code::kRankFailed,
             HowItLeft(departure, " before it ran " + Title(*last.description) +
                                      ", which it had submitted"));
}

void CoordinatorService::NoteGpuRun(const Decision& decision) {
  NoteLast({decision.ranks, decision.first, queued_});
}

// All ranks make the set's communicator together, out of the one that they have.
void CoordinatorService::NoteAddition(const Decision& decision) {
  const auto of_all = last_gpu_runs_.find(0);
  if (of_all == last_gpu_runs_.end()) return;
  const auto addition = std::make_shared<Description>();
  addition->kind = decision.agreed;
  addition->name = decision.tensors.front().name;
  NoteLast({of_all->second.members, addition, queued_});
}

void CoordinatorService::NoteLast(const LastRun& last) {
  last_gpu_runs_[last.description->process_set] = last;
  // A rank's last submission may be decided after it has left.
  for (const auto& [rank, departure] : departures_) CheckRun(last, departure);
}

void CoordinatorService::Queue(std::string_view message) {
  queued_ += 1;
  decisions_->Queue(message);
  if (below_ != nullptr) below_->Queue(message);
}

void CoordinatorService::WriteDecision(const Decision& decision) {
  if (decision.type == Decision::Type::kRun) {
    const bool runs_here = decision.ranks.front() == JobState::kCoordinator;
    timeline_.AddDecision(++batches_, decision, runs_here);
  } else if (decision.agreed == Kind::kAddProcessSet) {
    batches_ += 1;
  }
  if (merger_ != nullptr) merger_->Note(decision);
  Queue(encoder_.Encode(decision));
  const bool runs = decision.type == Decision::Type::kRun;
  if (runs && decision.first->on_gpu && topology_.hosts() > 1) NoteGpuRun(decision);
  if (decision.agreed == Kind::kAddProcessSet) NoteAddition(decision);
}

// ---- Autotuning

void CoordinatorService::StartAutotune(const AutotuneOptions& options,
                                       const Tuning& defaults) {
  autotune_ = std::make_unique<Autotune>(options, defaults);
  autotune_log_ = options.log;
  WriteTuning();
}

void CoordinatorService::NoteRun(const std::vector<TensorKey>& tensors, int64_t bytes) {
  const Tuning before = autotune_->tuning();
  if (!autotune_->Add(tensors, bytes, Seconds(Clock::now().time_since_epoch()))) return;
  if (autotune_->tuning() != before) {
    WriteTuning();
    // Now: the driving thread may stop here and does not look at the queue.
    Send();
  }
  WriteAutotuneLog();
  if (autotune_->done() && LogEnabled(LogLevel::kInfo)) {
    Log(job_->rank(), LogLevel::kInfo,
        "autotune ends with " + Describe(autotune_->best()));
  }
}

// The message has its place among the decisions, so every rank applies it to the
// decisions after it.
void CoordinatorService::WriteTuning() {
  const Tuning& tuning = autotune_->tuning();
  coordinator_.set_fusion_bytes(tuning.fusion_bytes);
  Queue(encoder_.Encode(tuning));
}

// The job goes on without the file.
void CoordinatorService::WriteAutotuneLog() {
  if (autotune_log_.empty()) return;
  const Status status =
      keras_hvd::WriteAutotuneLog(autotune_log_, job_->size(), *autotune_);
  if (status.ok()) return;
  autotune_log_.clear();
  Log(job_->rank(), LogLevel::kWarning, status.message);
}

// ---- Stalls

// The submissions of its host's ranks are not known here.
std::string CoordinatorService::SilenceText(int leader) const {
  return "\n  " + job_->Describe(leader) +
         " does not answer, which speaks for its host: see whether its process is "
         "stopped";
}

std::string CoordinatorService::StallText(const Stall& stall, double seconds) {
  const int32_t set = stall.key.process_set;
  std::string text = RankList(stall.waiting) + " waited " + SecondsText(seconds) +
                     " for " + Title(stall.kind, stall.key.name) +
                     ", which not every rank ";
  if (set != 0) text += "of process set " + std::to_string(set) + " ";
  text += "has reached.";
  for (int rank : stall.missing) {
    const int leader = topology_.leader_of(topology_.host_of(rank));
    if (job_->IsSilent(leader)) {
      if (rank == leader || !Contains(stall.missing, leader))
        text += SilenceText(leader);
      continue;
    }
    text += "\n  " + job_->Describe(rank) + " has not";
    const std::string last = coordinator_.LastSubmission(rank);
    text += last.empty() ? "; it has submitted nothing yet" : "; its last was " + last;
    text += job_->Obstacle(rank);
  }
  return text;
}

void CoordinatorService::WarnOfJoin(const Stall& join, double seconds) {
  if (std::exchange(warned_of_join_, join.joined) == join.joined) return;
  const bool one = join.waiting.size() == 1;
  const bool one_left = join.missing.size() == 1;
  std::string text = RankList(join.waiting) + (one ? " has" : " have") +
                     " taken part in no step for " + SecondsText(seconds) +
                     " (the data there have ended, or the script has called join() or "
                     "failed), and " +
                     (one ? "waits for " : "wait for ") + RankList(join.missing) +
                     ", which " + (one_left ? "goes" : "go") + " on.";
  if (join.gave_zeros) {
    text += " What all ranks reduce takes zeros from " + RankList(join.waiting) +
            ", and averages still divide by the number of all ranks.";
  }
  Log(job_->rank(), LogLevel::kWarning,
      text + "\n  If the data of " + RankList(join.missing) +
          " do not end, as after .repeat(), neither does this: give each rank as much "
          "data, with keras_hvd.data.even(dataset), or steps_per_epoch to fit");
}

void CoordinatorService::CheckStalls(double warning, double abort, double patience) {
  const double now = Seconds(Clock::now().time_since_epoch());
  if (merger_ != nullptr) {
    merger_->PassOnOld();
    Decide();
  }
  const std::vector<Stall> stalls = coordinator_.Stalls();
  anything_waits_ = !stalls.empty();
  if (stalls.empty()) warned_.clear();
  timeline_.AddStalls(stalls, now);
  for (const Stall& stall : stalls) {
    const double seconds = now - stall.since;
    if (seconds >= patience / 2) job_->AskForSigns();
    if (abort > 0 && seconds >= abort) {
      job_->Fail(Code::kRankFailed,
                 StallText(stall, seconds) +
                     "\n  The job was ended by KERAS_HVD_STALL_ABORT_SECONDS");
      return;
    }
    if (warning < 0) continue;
    if (stall.others_go_on && now - stall.joined >= warning) {
      WarnOfJoin(stall, now - stall.joined);
    }
    if (seconds < warning) continue;
    const auto [it, unseen] = warned_.try_emplace(stall.key, stall.since);
    if (!unseen && it->second == stall.since) continue;
    it->second = stall.since;
    Log(job_->rank(), LogLevel::kWarning, StallText(stall, seconds));
  }
}

}  // namespace keras_hvd
