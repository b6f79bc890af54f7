#include "tf_ops/engine/submission_reader.h"

#include <algorithm>
#include <utility>
#include <variant>

namespace keras_hvd {

SubmissionReader::SubmissionReader(const World& world, Listener listener)
    : job_(world.job), listener_(std::move(listener)), descriptions_(job_->size()) {
  const std::vector<int>& local = world.topology.local_ranks();
  auto channels = world.channels->FromRanks();
  for (size_t i = 0; i < channels.size(); ++i) {
    submitters_.push_back({local[i],
                           {local[i]},
                           std::move(channels[i]),
                           SubmissionDecoder(&descriptions_)});
  }
  const std::vector<int> children = world.topology.children();
  auto below = world.channels->FromBelow();
  for (size_t i = 0; i < below.size(); ++i) {
    below_.push_back(
        {world.topology.leader_of(children[i]), std::move(below[i]),
         MergedDecoder(world.topology.ranks_below(children[i]), &descriptions_)});
  }
}

bool SubmissionReader::HasSubmissions() const {
  return std::any_of(submitters_.begin(), submitters_.end(),
                     [](const Submitter& each) { return each.channel->HasNews(); });
}

bool SubmissionReader::HasNews() const {
  return std::any_of(submitters_.begin(), submitters_.end(),
                     [this](const Submitter& each) {
                       return !each.departed && job_->HasShutDown(each.rank);
                     }) ||
         std::any_of(below_.begin(), below_.end(),
                     [](const LeaderBelow& each) { return each.channel->HasNews(); });
}

bool SubmissionReader::Read() {
  bool progressed = false;
  // The order matters: a rank that submits after another has left is told so.
  for (Submitter& each : submitters_) progressed |= each.channel->Receive();
  progressed |= NoteDepartures();
  for (Submitter& each : submitters_) HandleSubmissions(&each);
  for (LeaderBelow& each : below_) {
    progressed |= each.channel->Receive();
    HandleMessages(&each);
  }
  return progressed;
}

// A rank writes all its submissions before it says that it leaves. Hence they are read
// once more after the departure is seen.
bool SubmissionReader::NoteDepartures() {
  bool progressed = false;
  for (Submitter& submitter : submitters_) {
    if (submitter.departed || !job_->HasShutDown(submitter.rank)) continue;
    submitter.channel->Receive();
    HandleSubmissions(&submitter);
    submitter.departed = true;
    progressed = true;
    listener_.leave({submitter.rank,
                     static_cast<int64_t>(job_->CarriedOut(submitter.rank)), -1,
                     job_->HowItLeft(submitter.rank)});
  }
  return progressed;
}

void SubmissionReader::HandleSubmissions(Submitter* from) {
  std::string_view message;
  while (from->channel->Next(&message)) HandleSubmission(from, message);
}

void SubmissionReader::HandleSubmission(Submitter* from, std::string_view message) {
  Submission submission;
  const Status status = from->decoder.Decode(message, &submission);
  if (!status.ok()) return Refuse(from->rank, status);
  MergedSubmission merged;
  merged.description = std::move(submission.description);
  merged.duplicate = submission.duplicate;
  merged.ranks = from->ranks;
  if (submission.submitted.has_value()) merged.submitted = {*submission.submitted};
  if (submission.input.has_value()) {
    merged.inputs.push_back(std::move(*submission.input));
  }
  listener_.submit(std::move(merged));
}

void SubmissionReader::HandleMessages(LeaderBelow* from) {
  std::string_view message;
  while (from->channel->Next(&message)) {
    UpwardMessage decoded;
    // Its times travel as ages at the moment of sending.
    const Status status =
        from->decoder.Decode(message, from->channel->SentAt(), &decoded);
    if (!status.ok()) return Refuse(from->rank, status);
    if (const auto* departure = std::get_if<RankDeparture>(&decoded)) {
      listener_.leave(*departure);
    } else if (const auto* run = std::get_if<SubmissionRun>(&decoded)) {
      listener_.submit_run(*run);
    } else {
      listener_.submit(std::move(std::get<MergedSubmission>(decoded)));
    }
  }
}

void SubmissionReader::Refuse(int rank, const Status& status) {
  job_->Fail(status.code,
             job_->Describe(rank) +
                 " has sent a submission that is malformed: " + status.message +
                 ". This is a bug in keras_hvd, or memory was overwritten");
}

}  // namespace keras_hvd
