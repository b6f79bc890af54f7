#include "tf_ops/coordination/submission_merger.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

namespace keras_hvd {
namespace {

// Times or inputs that only some have must not get lost.
bool AreAlike(const MergedSubmission& a, const MergedSubmission& b) {
  // Equal descriptions are usually the same object.
  return (a.description == b.description || *a.description == *b.description) &&
         a.submitted.empty() == b.submitted.empty() &&
         a.inputs.empty() == b.inputs.empty();
}

template <typename Value>
void Append(std::vector<Value> from, std::vector<Value>* to) {
  to->insert(to->end(), std::make_move_iterator(from.begin()),
             std::make_move_iterator(from.end()));
}

template <typename Value>
void Rearrange(const std::vector<size_t>& order, std::vector<Value>* values) {
  if (values->empty()) return;
  std::vector<Value> rearranged;
  rearranged.reserve(order.size());
  for (size_t place : order) rearranged.push_back(std::move((*values)[place]));
  *values = std::move(rearranged);
}

// Sorts times and inputs, which are in the order of these ranks.
void SortByRank(const std::vector<int>& ranks, MergedSubmission* merged) {
  if (std::is_sorted(ranks.begin(), ranks.end())) return;
  std::vector<size_t> order(ranks.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return ranks[a] < ranks[b]; });
  Rearrange(order, &merged->submitted);
  Rearrange(order, &merged->inputs);
}

}  // namespace

SubmissionMerger::SubmissionMerger(RankSet ranks) : ranks_(std::move(ranks)) {}

void SubmissionMerger::AddProcessSet(int32_t id, const std::vector<int>& members) {
  std::vector<int> below;
  for (int member : members) {
    if (ranks_.Has(member)) below.push_back(member);
  }
  // The usual ones are one object, so that they travel as a number.
  process_sets_[id] = ranks_.list() == below ? ranks_ : RankSet(std::move(below));
}

void SubmissionMerger::RemoveProcessSet(int32_t id) {
  names_.EraseIf([&](const TensorKey& key, Rounds& rounds) {
    if (key.process_set != id) return false;
    PassOn(rounds.size(), &rounds);
    waiting_ -= rounds.size();
    return true;
  });
  process_sets_.erase(id);
}

void SubmissionMerger::Submit(MergedSubmission submission) {
  if (IsAgreement(submission.description->kind)) {
    return SubmitAgreement(std::move(submission));
  }
  const RankSet* const set =
      SetThatHolds(submission.description->process_set, submission.ranks);
  if (set == nullptr) {
    passed_on_.emplace_back(std::move(submission));
    return;
  }
  EraseIdleOfMany();
  Rounds& rounds = names_.Of(submission.description);
  Add(std::move(submission), *set, &rounds);
}

void SubmissionMerger::Submit(const SubmissionRun& run) {
  const auto at = [&run](size_t place) {
    return MergedSubmission{(*run.descriptions)[place], false, run.ranks, {}, {}};
  };
  const size_t count = run.descriptions->size();
  const RankSet* const set =
      SetThatHolds(run.descriptions->front()->process_set, run.ranks);
  if (set == nullptr) {
    for (size_t i = 0; i < count; ++i) passed_on_.emplace_back(at(i));
    return;
  }
  EraseIdleOfMany();
  const std::vector<Rounds*>& rounds = names_.Of(run.descriptions);
  for (size_t i = 0; i < count; ++i) {
    const bool was_alike =
        AddToHeld((*run.descriptions)[i], run.ranks, *set, rounds[i]);
    if (!was_alike) Add(at(i), *set, rounds[i]);
  }
}

// Adds a plain request to the others' equal one, as Add would. A rank that is not in
// the first round is in none behind it.
bool SubmissionMerger::AddToHeld(const std::shared_ptr<const Description>& description,
                                 const RankSet& ranks, const RankSet& set,
                                 Rounds* rounds) {
  if (rounds->empty()) return false;
  Round& round = rounds->front();
  if (round.held.description != description || !round.held.is_plain()) return false;
  const auto& both = unions_.Of(round.has, ranks.bitmap());
  if (both == nullptr) return false;
  round.has = both;
  if (round.has->count() == set.size()) Complete(1, rounds);
  return true;
}

void SubmissionMerger::EraseIdleOfMany() {
  names_.EraseIdleOfMany([](const Rounds& rounds) { return rounds.empty(); });
}

// Adds it to the first round that none of its ranks has come to.
void SubmissionMerger::Add(MergedSubmission submission, const RankSet& set,
                           Rounds* to) {
  Rounds& rounds = *to;
  const size_t place = FirstRoundAfter(submission.ranks, rounds);
  if (place == rounds.size()) {
    rounds.emplace_back();
    rounds.back().period = period_;
    rounds.back().number = begun_++;
    waiting_ += 1;
  }
  Round& round = rounds[place];
  // Nobody waits for the rest of a round that will fail.
  const bool fits = !submission.duplicate && (round.held.description == nullptr ||
                                              AreAlike(round.held, submission));
  if (!fits) PassOn(place + 1, &rounds);
  round.has = unions_.Of(round.has, submission.ranks.bitmap());
  if (round.passed_on) {
    passed_on_.emplace_back(std::move(submission));
  } else {
    Hold(std::move(submission), &round);
  }
  if (round.has->count() == set.size()) Complete(place + 1, &rounds);
}

// All ranks have come to the last of the first `count` rounds, and so will not come to
// an earlier one any more.
void SubmissionMerger::Complete(size_t count, Rounds* rounds) {
  PassOn(count, rounds);
  rounds->erase(rounds->begin(), rounds->begin() + count);
  waiting_ -= count;
}

void SubmissionMerger::Hold(MergedSubmission submission, Round* round) {
  const bool has_values = !submission.submitted.empty() || !submission.inputs.empty();
  if (has_values) Append(submission.ranks.list(), &round->arrivals);
  if (round->held.description == nullptr) {
    round->held = std::move(submission);
    return;
  }
  Append(std::move(submission.submitted), &round->held.submitted);
  Append(std::move(submission.inputs), &round->held.inputs);
}

// The requests that a rank waits for, or lacks, matter for its agreements.
void SubmissionMerger::SubmitAgreement(MergedSubmission submission) {
  PassOnAll();
  if (submission.description->kind == Kind::kJoin) {
    joins_.insert(submission.ranks.begin(), submission.ranks.end());
    ForgetAll();
  }
  passed_on_.emplace_back(std::move(submission));
}

// The set whose members below all have to submit this. Null if it is not to be held: a
// rank that has joined or left may never submit it, and to an unknown set, or one
// without the rank, the coordinator has an answer at once.
const RankSet* SubmissionMerger::SetThatHolds(int32_t process_set,
                                              const RankSet& ranks) const {
  if (somebody_left_ || !joins_.empty()) return nullptr;
  const auto found = process_sets_.find(process_set);
  if (found == process_sets_.end()) return nullptr;
  // All ranks below are usually members.
  const bool holds = found->second == ranks_ || found->second.HasAllOf(ranks);
  return holds ? &found->second : nullptr;
}

// The first round such that neither it nor a later one has any of these ranks.
size_t SubmissionMerger::FirstRoundAfter(const RankSet& ranks, const Rounds& rounds) {
  size_t place = rounds.size();
  while (place > 0 && unions_.Of(rounds[place - 1].has, ranks.bitmap()) != nullptr) {
    --place;
  }
  return place;
}

// Passes on the submissions held in the first `count` rounds. Later submissions of
// these rounds will not be held.
void SubmissionMerger::PassOn(size_t count, Rounds* rounds) {
  for (size_t i = 0; i < count; ++i) PassOn(&(*rounds)[i]);
}

void SubmissionMerger::PassOn(Round* round) {
  if (std::exchange(round->passed_on, true)) return;
  MergedSubmission& held = round->held;
  if (held.description == nullptr) return;
  SortByRank(round->arrivals, &held);
  const RankSet& below = process_sets_.at(held.description->process_set);
  held.ranks =
      round->has->count() == below.size() ? below : RankSet(round->has->List());
  passed_on_.emplace_back(std::move(held));
  held.description = nullptr;
}

// In the order in which they began: reports of stalls say what came first, and what
// ranks submitted last.
template <typename Condition>
void SubmissionMerger::PassOnThose(const Condition& condition) {
  std::vector<Round*> those;
  for (auto& [key, rounds] : names_) {
    for (Round& round : rounds) {
      if (condition(round)) those.push_back(&round);
    }
  }
  std::sort(those.begin(), those.end(),
            [](const Round* a, const Round* b) { return a->number < b->number; });
  for (Round* round : those) PassOn(round);
}

void SubmissionMerger::PassOnAll() {
  PassOnThose([](const Round&) { return true; });
}

void SubmissionMerger::ForgetAll() {
  for (auto& [key, rounds] : names_) rounds.clear();
  waiting_ = 0;
}

void SubmissionMerger::Leave(const RankDeparture& departure) {
  PassOnAll();
  ForgetAll();
  somebody_left_ = true;
  passed_on_.emplace_back(departure);
}

void SubmissionMerger::EndJoin(const std::vector<int>& ranks) {
  for (int rank : ranks) {
    const auto join = joins_.find(rank);
    if (join != joins_.end()) joins_.erase(join);
  }
}

void SubmissionMerger::Note(const Decision& decision) {
  const bool failed = decision.type == Decision::Type::kFail;
  if (failed && decision.tensors.front().name == kJoinName) {
    EndJoin(decision.ranks.list());
  }
  if (decision.type != Decision::Type::kAgree) return;
  if (decision.agreed == Kind::kJoin) {
    EndJoin(decision.ranks.list());
  } else if (decision.agreed == Kind::kAddProcessSet) {
    AddProcessSet(decision.answer, decision.members);
  } else {
    RemoveProcessSet(decision.answer);
  }
}

void SubmissionMerger::PassOnOld() {
  PassOnThose([this](const Round& round) { return round.period < period_; });
  period_ += 1;
}

bool SubmissionMerger::Next(Upward* message) {
  if (taken_ == passed_on_.size()) {
    passed_on_.clear();
    taken_ = 0;
    return false;
  }
  *message = std::move(passed_on_[taken_++]);
  return true;
}

}  // namespace keras_hvd
