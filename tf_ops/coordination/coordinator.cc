#include "tf_ops/coordination/coordinator.h"

#include <algorithm>
#include <limits>

namespace keras_hvd {
namespace {

// How many requests that do not fit into a batch to skip while looking for some that
// do. Looking at all of them for every batch would take quadratic time.
constexpr size_t kMostPassedOver = 64;

// For how many sets of ranks the last submission is noted.
constexpr size_t kMostSetsNoted = 256;

// "ranks 0, 1: allreduce Sum of float32[3]; rank 2: allreduce Sum of float32[4]".
std::string WhatEachGave(const std::vector<std::pair<int, const Description*>>& given) {
  const Description& first = *given.front().second;
  const auto other = std::find_if(given.begin(), given.end(), [&](const auto& each) {
    return !each.second->Matches(first);
  });
  std::vector<std::pair<int, std::string>> texts;
  for (const auto& [rank, description] : given) {
    std::string& details = texts.emplace_back(rank, Details(*description)).second;
    if (other != given.end()) {
      const bool is_first = description->Matches(first);
      details += FirstDifference(*description, is_first ? *other->second : first);
    }
  }
  return WhoGaveWhat(texts);
}

// The part of a submission that is of the ranks to keep.
template <typename Keep>
MergedSubmission Part(const MergedSubmission& whole, const Keep& keep) {
  MergedSubmission part;
  part.description = whole.description;
  part.duplicate = whole.duplicate;
  std::vector<int> ranks;
  for (size_t i = 0; i < whole.ranks.size(); ++i) {
    if (!keep(whole.ranks[i])) continue;
    ranks.push_back(whole.ranks[i]);
    if (!whole.submitted.empty()) part.submitted.push_back(whole.submitted[i]);
    if (!whole.inputs.empty()) part.inputs.push_back(whole.inputs[i]);
  }
  part.ranks = std::move(ranks);
  return part;
}

std::string JoinedText(const Description& description, const std::vector<int>& joined) {
  std::string text = RankList(joined) + (joined.size() == 1 ? " has" : " have");
  text += " joined, and gives zeros from then on. Zeros only suit allreduces of all ";
  text += "ranks with Sum or Average, not " + Details(description);
  if (description.process_set != 0) {
    text += " in process set " + std::to_string(description.process_set);
  }
  return text;
}

}  // namespace

Coordinator::Coordinator(int size, int64_t fusion_bytes)
    : fusion_bytes_(fusion_bytes), joined_(size), last_of_rank_(size) {
  std::vector<int> all(size);
  for (int rank = 0; rank < size; ++rank) all[rank] = rank;
  AddProcessSet(0, std::move(all));
}

void Coordinator::AddProcessSet(int32_t id, RankSet ranks) {
  process_sets_[id] = std::move(ranks);
  last_process_set_ = std::max(last_process_set_, id);
}

double Coordinator::Group::since(size_t place) const {
  return submission.submitted.empty()
             ? now
             : Seconds(submission.submitted[place].time_since_epoch());
}

void Coordinator::Round::Add(Group group) {
  const MergedSubmission& added = group.submission;
  if (!groups.empty()) {
    // Equal descriptions are usually the same object.
    wrong = wrong || (added.description != description() &&
                      !added.description->Matches(*description()));
    if (added.ranks.front() < groups[first].submission.ranks.front()) {
      first = groups.size();
    }
  }
  wrong = wrong || added.duplicate;
  groups.push_back(std::move(group));
}

void Coordinator::Submit(MergedSubmission submission, double now) {
  const bool joins = submission.description->kind == Kind::kJoin;
  if (joins && submission.ranks.size() > 1) {
    // Each join changes the state that the others' requests meet.
    for (int rank : submission.ranks) {
      Submit(Part(submission, [rank](int other) { return other == rank; }), now);
    }
    return;
  }
  NoteLast(submission);
  last_submission_ = submission.submitted.empty()
                         ? now
                         : Seconds(submission.submitted.back().time_since_epoch());
  if (!joins) last_of_others_ = last_submission_;
  const int32_t id = submission.description->process_set;
  const auto set = process_sets_.find(id);
  if (set == process_sets_.end()) {
    return Fail(*submission.description, submission.ranks,
                "there is no process set " + std::to_string(id) + " any more");
  }
  const RankSet members = set->second;
  if (!members.HasAllOf(submission.ranks)) {
    submission = FailStrangers(submission, members);
  }
  entries_.EraseIdleOfMany(
      [](const Entry& entry) { return entry.rounds.empty() && entry.owed.empty(); });
  Entry& entry = entries_.Of(submission.description);
  if (!entry.owed.empty()) submission = PayOwed(std::move(submission), &entry.owed);
  if (submission.ranks.empty()) return;
  const int first_rank = submission.ranks.front();
  if (!AddToRounds(std::move(submission), now, &entry)) return;
  if (joins && HowSomebodyLeft(members) == nullptr) Join(first_rank);
  Settle(&entry, members);
}

void Coordinator::NoteLast(const MergedSubmission& submission) {
  const Last last = {submission.description, ++submissions_};
  if (submission.ranks.size() == 1) {
    last_of_rank_[submission.ranks.front()] = last;
    return;
  }
  last_of_set_[submission.ranks] = last;
  if (last_of_set_.size() < kMostSetsNoted) return;
  for (const auto& [ranks, of_set] : last_of_set_) {
    for (int rank : ranks) {
      if (of_set.order > last_of_rank_[rank].order) last_of_rank_[rank] = of_set;
    }
  }
  last_of_set_.clear();
}

// Returns the part of the members.
MergedSubmission Coordinator::FailStrangers(const MergedSubmission& submission,
                                            const RankSet& members) {
  const Description& description = *submission.description;
  for (int rank : submission.ranks) {
    if (members.Has(rank)) continue;
    Fail(description, {rank},
         "rank " + std::to_string(rank) + " is not in process set " +
             std::to_string(description.process_set));
  }
  return Part(submission, [&](int rank) { return members.Has(rank); });
}

// Fails the submission on ranks that are owed a failure. Returns the part of the
// others.
MergedSubmission Coordinator::PayOwed(MergedSubmission submission,
                                      std::vector<Owed>* owed) {
  for (Owed& each : *owed) {
    const auto is_owed = [&](int rank) { return each.by_rank[rank]; };
    const RankSet paid = Part(submission, is_owed).ranks;
    if (paid.empty()) continue;
    Fail(*submission.description, paid, each.text);
    submission = Part(submission, std::not_fn(is_owed));
    for (int rank : paid) each.by_rank[rank] = false;
    each.count -= paid.size();
  }
  const auto is_paid = [](const Owed& each) { return each.count == 0; };
  owed->erase(std::remove_if(owed->begin(), owed->end(), is_paid), owed->end());
  return submission;
}

// Adds each rank's request to the first round that has none of the rank. Returns
// whether the first of all rounds has got any.
bool Coordinator::AddToRounds(MergedSubmission submission, double now, Entry* entry) {
  bool is_first = false;
  for (size_t place = 0; !submission.ranks.empty(); ++place) {
    if (place == entry->rounds.size()) {
      entry->rounds.emplace_back().groups = std::move(entry->spare);
    }
    Round& round = entry->rounds[place];
    MergedSubmission rest;
    std::shared_ptr<const RankBitmap> both =
        unions_.Of(round.has, submission.ranks.bitmap());
    if (both == nullptr) {
      const auto has = [&](int rank) { return round.has->Has(rank); };
      rest = Part(submission, has);
      submission = Part(submission, std::not_fn(has));
      if (!submission.ranks.empty()) {
        both = unions_.Of(round.has, submission.ranks.bitmap());
      }
    }
    if (both != nullptr) {
      round.has = std::move(both);
      round.Add({std::move(submission), now, ++submissions_});
      is_first = is_first || place == 0;
    }
    submission = std::move(rest);
  }
  return is_first;
}

void Coordinator::RemoveFromRounds(int rank, std::deque<Round>* rounds) {
  for (Round& round : *rounds) {
    Round left;
    for (Group& group : round.groups) {
      group.submission =
          Part(group.submission, [rank](int other) { return other != rank; });
      if (group.submission.ranks.empty()) continue;
      left.has = unions_.Of(left.has, group.submission.ranks.bitmap());
      left.Add(std::move(group));
    }
    round = std::move(left);
  }
  // A rank that is not in a round is in none behind it.
  while (!rounds->empty() && rounds->back().groups.empty()) rounds->pop_back();
}

// Requests that wait for the rank can go on without it, or never will.
void Coordinator::Join(int rank) {
  if (joined_count_ == 0) gave_zeros_ = false;
  joined_[rank] = true;
  joined_count_ += 1;
  for (auto& [key, entry] : entries_) {
    const RankSet& members = process_sets_.at(key.process_set);
    if (!members.Has(rank)) continue;
    // The rank will not call these any more. A later call under the name is a new one.
    for (Owed& each : entry.owed) {
      each.count -= each.by_rank[rank] ? 1 : 0;
      each.by_rank[rank] = false;
    }
    const bool joins = !entry.rounds.empty() &&
                       entry.rounds.front().description()->kind == Kind::kJoin;
    if (!joins) Settle(&entry, members);
  }
}

// Settles the first round, by a departure, a mistake or a match, and then the rounds
// behind it.
void Coordinator::Settle(Entry* entry, const RankSet& members) {
  while (!entry->rounds.empty()) {
    Round& round = entry->rounds.front();
    const std::shared_ptr<const Description> description = round.description();
    if (const std::string* how = HowSomebodyLeft(members)) {
      const std::string what = IsAgreement(description->kind)
                                   ? Title(*description)
                                   : Quoted(description->name);
      FailFirst(entry, members, what + " cannot be completed: " + *how, Owe::kNo, true);
      continue;
    }
    if (round.wrong) {
      FailFirst(entry, members, WhatIsWrong(round), Owe::kYes);
      continue;
    }
    std::vector<int> joined = JoinedBefore(round, members);
    if (!joined.empty() && !TakesZeros(*description)) {
      // The others' calls of this name are numbered by the rounds that they have met.
      FailFirst(entry, members, JoinedText(*description, joined), Owe::kYes);
      continue;
    }
    if (round.has->count() + joined.size() < members.size()) return;
    if (IsAgreement(description->kind)) {
      Agree(entry, members);
      continue;
    }
    gave_zeros_ = gave_zeros_ || !joined.empty();
    pending_decisions_.push_back({KeyOf(*description),
                                  description,
                                  members,
                                  std::move(joined),
                                  TakeInputs(members, &round),
                                  {},
                                  Times(round)});
    round.groups.clear();
    entry->spare = std::move(round.groups);
    entry->rounds.pop_front();
  }
}

// In the order of their ranks.
std::vector<Coordinator::Head> Coordinator::Heads(const Round& round) {
  std::vector<Head> heads;
  heads.reserve(round.has->count());
  for (const Group& group : round.groups) {
    const RankSet& ranks = group.submission.ranks;
    for (size_t i = 0; i < ranks.size(); ++i) heads.push_back({ranks[i], &group, i});
  }
  std::sort(heads.begin(), heads.end(),
            [](const Head& a, const Head& b) { return a.rank < b.rank; });
  return heads;
}

// The inputs of all members if all in the round gave one.
std::vector<std::string> Coordinator::TakeInputs(const RankSet& members, Round* round) {
  const bool all =
      std::all_of(round->groups.begin(), round->groups.end(),
                  [](const Group& group) { return !group.submission.inputs.empty(); });
  if (!all) return {};
  std::vector<std::string> inputs(members.size());
  for (Group& group : round->groups) {
    auto member = members.begin();
    const RankSet& ranks = group.submission.ranks;
    for (size_t i = 0; i < ranks.size(); ++i) {
      member = std::lower_bound(member, members.end(), ranks[i]);
      inputs[member - members.begin()] = std::move(group.submission.inputs[i]);
    }
  }
  return inputs;
}

// When each rank submitted its request.
std::vector<std::pair<int, double>> Coordinator::Times(const Round& round) const {
  std::vector<std::pair<int, double>> times;
  if (!wants_times_) return times;
  for (const Head& head : Heads(round)) {
    times.emplace_back(head.rank, head.group->since(head.place));
  }
  return times;
}

// Members that have joined without a request in the round, for which the others wait.
std::vector<int> Coordinator::JoinedBefore(const Round& round,
                                           const RankSet& members) const {
  std::vector<int> joined;
  if (joined_count_ == 0 || round.description()->kind == Kind::kJoin) return joined;
  for (int member : members) {
    if (joined_[member] && !round.has->Has(member)) joined.push_back(member);
  }
  return joined;
}

// All members have requested the same.
void Coordinator::Agree(Entry* entry, const RankSet& members) {
  const Round& round = entry->rounds.front();
  const std::shared_ptr<const Description> description = round.description();
  Decision decision;
  decision.type = Decision::Type::kAgree;
  decision.tensors = {KeyOf(*description)};
  decision.ranks = members;
  decision.agreed = description->kind;
  decision.members = description->members;
  std::string refusal;
  if (description->kind == Kind::kAddProcessSet) {
    refusal = AgreeOnAdding(round, &decision);
  } else if (description->kind == Kind::kRemoveProcessSet) {
    refusal = AgreeOnRemoving(*description, &decision);
  } else {
    const auto last = std::max_element(
        round.groups.begin(), round.groups.end(),
        [](const Group& a, const Group& b) { return a.order < b.order; });
    decision.answer = last->submission.ranks.back();
    joined_.assign(joined_.size(), false);
    joined_count_ = 0;
  }
  if (!refusal.empty()) return FailFirst(entry, members, refusal, Owe::kNo);
  entry->rounds.pop_front();
  pending_decisions_.push_back(
      {KeyOf(*description), nullptr, {}, {}, {}, std::move(decision), {}});
}

// Gives the set a number that no rank has ever known: functions traced for a set of an
// earlier job must not reduce over this one. Returns the reason against it, or "".
std::string Coordinator::AgreeOnAdding(const Round& round, Decision* decision) {
  const Description& description = *round.description();
  for (const auto& [id, members] : process_sets_) {
    if (members.list() != description.members) continue;
    return "process set " + std::to_string(id) + " already has " +
           RankList(members.list()) + ". No two sets may have the same ranks";
  }
  int32_t last = last_process_set_;
  for (const Group& group : round.groups) {
    last = std::max(last, group.submission.description->last_earlier_set);
  }
  if (last == std::numeric_limits<int32_t>::max()) {
    return "no number is left for another process set";
  }
  decision->answer = last + 1;
  AddProcessSet(decision->answer, description.members);
  return "";
}

std::string Coordinator::AgreeOnRemoving(const Description& description,
                                         Decision* decision) {
  const auto set = std::find_if(
      process_sets_.begin(), process_sets_.end(),
      [&](const auto& other) { return other.second.list() == description.members; });
  if (set == process_sets_.end() || set->first == 0) {
    return "there is no process set of " + RankList(description.members) +
           " that could be removed";
  }
  const int32_t id = set->first;
  const std::string waiting = WhatWaits(id);
  if (!waiting.empty()) {
    return "process set " + std::to_string(id) + " is in use: " + waiting;
  }
  decision->answer = id;
  entries_.EraseIf(
      [id](const TensorKey& key, const Entry&) { return key.process_set == id; });
  process_sets_.erase(set);
  return "";
}

// Describes a waiting request of the set, as in "allreduce 'x' waits on rank 2", or "".
std::string Coordinator::WhatWaits(int32_t process_set) const {
  for (const auto& [key, entry] : entries_) {
    if (key.process_set != process_set || entry.rounds.empty()) continue;
    const Round& round = entry.rounds.front();
    return Title(*round.description()) + " waits on " + RankList(round.has->List());
  }
  return "";
}

// The reason why the requests cannot be one collective.
std::string Coordinator::WhatIsWrong(const Round& round) {
  std::vector<std::pair<int, const Description*>> given;
  for (const Head& head : Heads(round)) {
    const Description& description = *head.group->submission.description;
    if (head.group->submission.duplicate) {
      return Title(description) + " was submitted on rank " +
             std::to_string(head.rank) +
             " by a second op, or by another call of the same op, while the first was "
             "pending. Give each op its own name, or make the calls from one thread";
    }
    given.emplace_back(head.rank, &description);
  }
  if (IsAgreement(round.description()->kind)) {
    return "the ranks' calls differ (" + WhatEachGave(given) +
           "). Every rank must add and remove the same process sets in the same order";
  }
  return Quoted(round.description()->name) + " differs between ranks (" +
         WhatEachGave(given) + "). Every rank must submit the same under one name";
}

// Fails the first round. Members that are owed the failure get it when they come to the
// name.
void Coordinator::FailFirst(Entry* entry, const RankSet& members,
                            const std::string& text, Owe owe, bool departed) {
  const Round round = std::move(entry->rounds.front());
  entry->rounds.pop_front();
  Owed owed = {text, std::vector<bool>(joined_.size()), 0};
  for (int member : members) {
    if (owe == Owe::kNo || round.has->Has(member) || joined_[member]) continue;
    owed.by_rank[member] = true;
    owed.count += 1;
  }
  if (owed.count > 0) entry->owed.push_back(std::move(owed));
  for (const Group& group : round.groups) {
    if (group.submission.description->kind != Kind::kJoin) continue;
    for (int rank : group.submission.ranks) {
      joined_count_ -= joined_[rank] ? 1 : 0;
      joined_[rank] = false;
    }
  }
  Fail(*round.description(), round.has->List(), text);
  pending_decisions_.back().decision.departed = departed;
}

void Coordinator::Fail(const Description& description, RankSet ranks,
                       const std::string& text) {
  Decision failure;
  failure.type = Decision::Type::kFail;
  failure.tensors = {KeyOf(description)};
  failure.ranks = std::move(ranks);
  failure.text = text;
  pending_decisions_.push_back(
      {KeyOf(description), nullptr, {}, {}, {}, std::move(failure), {}});
}

// The way in which the first member that left did so; null if none has left.
const std::string* Coordinator::HowSomebodyLeft(const RankSet& members) const {
  for (const auto& [rank, how] : departures_) {
    if (members.Has(rank)) return &how;
  }
  return nullptr;
}

void Coordinator::Leave(int rank, const std::string& how) {
  departures_.emplace_back(rank, how);
  if (joined_[rank]) joined_count_ -= 1;
  joined_[rank] = false;
  for (auto& [key, entry] : entries_) {
    const RankSet& members = process_sets_.at(key.process_set);
    if (entry.rounds.empty() || !members.Has(rank)) continue;
    RemoveFromRounds(rank, &entry.rounds);
    Settle(&entry, members);
  }
}

void Coordinator::Take(PendingDecision* pending, Decision* decision) {
  decision->tensors.push_back(std::move(pending->key));
  if (!pending->since.empty()) {
    decision->requests.push_back({pending->description, std::move(pending->since)});
  }
  if (!pending->inputs.empty()) {
    decision->given.push_back({pending->description, std::move(pending->inputs)});
  }
  if (pending->joined.empty()) return;
  decision->zeros.push_back({pending->description, std::move(pending->joined)});
}

bool Coordinator::Next(Decision* decision) {
  if (pending_decisions_.empty()) return false;
  if (pending_decisions_.front().description == nullptr) {
    *decision = std::move(pending_decisions_.front().decision);
    pending_decisions_.pop_front();
    return true;
  }
  const std::shared_ptr<const Description> first =
      pending_decisions_.front().description;
  *decision = Decision();
  decision->type = Decision::Type::kRun;
  decision->ranks = pending_decisions_.front().members;
  decision->first = first;
  Take(&pending_decisions_.front(), decision);
  pending_decisions_.pop_front();
  if (first->kind != Kind::kAllreduce) return true;
  int64_t bytes = first->bytes();
  std::deque<PendingDecision> left;
  for (; !pending_decisions_.empty() &&
         pending_decisions_.front().description != nullptr &&
         left.size() < kMostPassedOver;
       pending_decisions_.pop_front()) {
    PendingDecision& next = pending_decisions_.front();
    const int64_t more = next.description->bytes();
    const bool behind_its_like = std::any_of(
        left.begin(), left.end(),
        [&](const PendingDecision& other) { return other.key == next.key; });
    const bool alike = next.inputs.empty() == decision->given.empty() &&
                       CanFuse(*first, *next.description);
    if (bytes + more > fusion_bytes_ || !alike || behind_its_like) {
      left.push_back(std::move(next));
      continue;
    }
    bytes += more;
    Take(&next, decision);
  }
  pending_decisions_.insert(pending_decisions_.begin(),
                            std::make_move_iterator(left.begin()),
                            std::make_move_iterator(left.end()));
  return true;
}

std::string Coordinator::LastSubmission(int rank) const {
  Last last = last_of_rank_[rank];
  for (const auto& [ranks, of_set] : last_of_set_) {
    if (of_set.order > last.order && ranks.Has(rank)) last = of_set;
  }
  return last.description == nullptr ? "" : Title(*last.description);
}

std::vector<Stall> Coordinator::Stalls() const {
  std::vector<std::pair<uint64_t, Stall>> found;
  for (const auto& [key, entry] : entries_) {
    if (entry.rounds.empty()) continue;
    const Round& round = entry.rounds.front();
    // The oldest request represents the name.
    const auto oldest = std::min_element(
        round.groups.begin(), round.groups.end(),
        [](const Group& a, const Group& b) { return a.order < b.order; });
    Stall stall = {key,
                   oldest->submission.description->kind,
                   oldest->since(0),
                   round.has->List(),
                   {}};
    for (int member : process_sets_.at(key.process_set)) {
      const bool is_missing = !round.has->Has(member) && !joined_[member];
      if (is_missing) stall.missing.push_back(member);
    }
    // Joined ranks wait for as long as the others have data. This is no stall while any
    // of those submits something.
    if (stall.kind == Kind::kJoin) {
      stall.joined = stall.since;
      stall.since = std::max(stall.since, last_submission_);
      stall.others_go_on = last_of_others_ > stall.joined;
      stall.gave_zeros = gave_zeros_;
    }
    found.emplace_back(oldest->order, std::move(stall));
  }
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Stall> stalls;
  for (auto& [order, stall] : found) stalls.push_back(std::move(stall));
  return stalls;
}

}  // namespace keras_hvd
