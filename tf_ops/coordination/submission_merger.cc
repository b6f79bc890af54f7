// See submission_merger.h.
#include "tf_ops/coordination/submission_merger.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

namespace keras_hvd {
namespace {

// What only some have, times or inputs, must not get lost.
bool AreAlike(const MergedSubmission& a, const MergedSubmission& b) {
  // Equal descriptions are usually the same object.
  return (a.description == b.description || a.description->Matches(*b.description)) &&
         a.submitted.empty() == b.submitted.empty() &&
         a.inputs.empty() == b.inputs.empty();
}

void Append(MergedSubmission from, MergedSubmission* to) {
  if (to->ranks.empty()) {
    *to = std::move(from);
    return;
  }
  to->ranks.insert(to->ranks.end(), from.ranks.begin(), from.ranks.end());
  to->submitted.insert(to->submitted.end(), from.submitted.begin(),
                       from.submitted.end());
  to->inputs.insert(to->inputs.end(), std::make_move_iterator(from.inputs.begin()),
                    std::make_move_iterator(from.inputs.end()));
}

template <typename Value>
void Rearrange(const std::vector<size_t>& order, std::vector<Value>* values) {
  if (values->empty()) return;
  std::vector<Value> rearranged;
  rearranged.reserve(order.size());
  for (size_t place : order) rearranged.push_back(std::move((*values)[place]));
  *values = std::move(rearranged);
}

void SortByRank(MergedSubmission* merged) {
  const std::vector<int>& ranks = merged->ranks;
  if (std::is_sorted(ranks.begin(), ranks.end())) return;
  std::vector<size_t> order(ranks.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return ranks[a] < ranks[b]; });
  Rearrange(order, &merged->ranks);
  Rearrange(order, &merged->submitted);
  Rearrange(order, &merged->inputs);
}

}  // namespace

SubmissionMerger::SubmissionMerger(std::vector<int> ranks) : ranks_(std::move(ranks)) {}

size_t SubmissionMerger::NameHash::operator()(
    const std::shared_ptr<const Description>& description) const {
  return std::hash<std::string>()(description->name) * 31 + description->process_set;
}

bool SubmissionMerger::SameName::operator()(
    const std::shared_ptr<const Description>& a,
    const std::shared_ptr<const Description>& b) const {
  return a == b || (a->process_set == b->process_set && a->name == b->name);
}

bool SubmissionMerger::Round::HasAny(const std::vector<int>& ranks) const {
  return std::any_of(ranks.begin(), ranks.end(), [&](int rank) { return has[rank]; });
}

void SubmissionMerger::AddProcessSet(int32_t id, const std::vector<int>& members) {
  ProcessSet& set = process_sets_[id] = {};
  set.has.resize(ranks_.back() + 1);
  for (int member : members) {
    if (!std::binary_search(ranks_.begin(), ranks_.end(), member)) continue;
    set.has[member] = true;
    set.count += 1;
  }
}

void SubmissionMerger::RemoveProcessSet(int32_t id) {
  process_sets_.erase(id);
  for (auto it = names_.begin(); it != names_.end();) {
    if (it->first->process_set != id) {
      ++it;
      continue;
    }
    PassOn(it->second.size(), &it->second);
    it = names_.erase(it);
  }
}

void SubmissionMerger::Submit(MergedSubmission submission) {
  if (IsAgreement(submission.description->kind)) {
    return SubmitAgreement(std::move(submission));
  }
  const ProcessSet* const set = SetThatHolds(submission);
  if (set == nullptr) {
    passed_on_.emplace_back(std::move(submission));
    return;
  }
  const auto name = names_.try_emplace(submission.description).first;
  Rounds& rounds = name->second;
  const size_t place = FirstRoundAfter(submission.ranks, rounds);
  if (place == rounds.size()) {
    rounds.emplace_back();
    rounds.back().has.resize(set->has.size());
    rounds.back().period = period_;
  }
  Round& round = rounds[place];
  for (int rank : submission.ranks) round.has[rank] = true;
  round.count += submission.ranks.size();
  // Nobody waits for the rest of a round that will fail.
  const bool fits = !submission.duplicate &&
                    (round.held.ranks.empty() || AreAlike(round.held, submission));
  if (!fits) PassOn(place + 1, &rounds);
  if (round.passed_on) {
    passed_on_.emplace_back(std::move(submission));
  } else {
    Append(std::move(submission), &round.held);
  }
  if (round.count < set->count) return;
  PassOn(place + 1, &rounds);
  // No rank will come to an earlier round any more.
  rounds.erase(rounds.begin(), rounds.begin() + place + 1);
  if (rounds.empty()) names_.erase(name);
}

// What a rank waits for, or lacks, matters for its agreements.
void SubmissionMerger::SubmitAgreement(MergedSubmission submission) {
  PassOnAll();
  if (submission.description->kind == Kind::kJoin) {
    joins_.insert(submission.ranks.begin(), submission.ranks.end());
    names_.clear();
  }
  passed_on_.emplace_back(std::move(submission));
}

// The set whose members below all have to submit this; null if it is not to be held: a
// rank that has joined or left may never submit it, and to an unknown set, or one
// without the rank, the coordinator has an answer at once.
const SubmissionMerger::ProcessSet* SubmissionMerger::SetThatHolds(
    const MergedSubmission& submission) const {
  if (somebody_left_ || !joins_.empty()) return nullptr;
  const auto found = process_sets_.find(submission.description->process_set);
  if (found == process_sets_.end()) return nullptr;
  const ProcessSet& set = found->second;
  const bool are_members = std::all_of(submission.ranks.begin(), submission.ranks.end(),
                                       [&](int rank) { return set.has[rank]; });
  return are_members ? &set : nullptr;
}

// The first round such that neither it nor a later one has any of these ranks.
size_t SubmissionMerger::FirstRoundAfter(const std::vector<int>& ranks,
                                         const Rounds& rounds) {
  size_t place = rounds.size();
  while (place > 0 && !rounds[place - 1].HasAny(ranks)) --place;
  return place;
}

// Passes on what is held of the first `count` rounds. What belongs to them and is still
// to come will not be held.
void SubmissionMerger::PassOn(size_t count, Rounds* rounds) {
  for (size_t i = 0; i < count; ++i) {
    Round& round = (*rounds)[i];
    if (round.passed_on) continue;
    round.passed_on = true;
    if (round.held.ranks.empty()) continue;
    SortByRank(&round.held);
    passed_on_.emplace_back(std::move(round.held));
  }
}

void SubmissionMerger::PassOnAll() {
  for (auto& [description, rounds] : names_) PassOn(rounds.size(), &rounds);
}

void SubmissionMerger::Leave(int rank) {
  PassOnAll();
  names_.clear();
  somebody_left_ = true;
  passed_on_.emplace_back(RankDeparture{rank});
}

void SubmissionMerger::EndJoin(const std::vector<int>& ranks) {
  for (int rank : ranks) {
    const auto join = joins_.find(rank);
    if (join != joins_.end()) joins_.erase(join);
  }
}

void SubmissionMerger::PassOnOld() {
  for (auto& [description, rounds] : names_) {
    const auto young =
        std::find_if(rounds.begin(), rounds.end(),
                     [&](const Round& round) { return round.period == period_; });
    PassOn(young - rounds.begin(), &rounds);
  }
  period_ += 1;
}

bool SubmissionMerger::Next(Upward* message) {
  if (passed_on_.empty()) return false;
  *message = std::move(passed_on_.front());
  passed_on_.pop_front();
  return true;
}

}  // namespace keras_hvd
