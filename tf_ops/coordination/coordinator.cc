// See coordinator.h.
#include "tf_ops/coordination/coordinator.h"

#include <algorithm>
#include <utility>

namespace keras_hvd {
namespace {

// How many requests that do not fit into a batch to skip while looking for some that
// do. Looking at all of them for every batch would take quadratic time.
constexpr size_t kMostPassedOver = 64;

// With fewer names than this, none is dropped.
constexpr size_t kEntriesKept = 4096;

// "ranks 0, 1: allreduce Sum of float32[3]; rank 2: allreduce Sum of float32[4]".
std::string WhatEachGave(const std::vector<std::pair<int, const Description*>>& given) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (const auto& [rank, description] : given) {
    std::string details = Details(*description);
    auto same = std::find_if(groups.begin(), groups.end(),
                             [&](const auto& group) { return group.first == details; });
    if (same == groups.end()) {
      groups.push_back({std::move(details), {rank}});
    } else {
      same->second.push_back(rank);
    }
  }
  std::string text;
  for (const auto& [details, ranks] : groups) {
    if (!text.empty()) text += "; ";
    text += RankList(ranks) + ": " + details;
  }
  return text;
}

bool Contains(const std::vector<int>& ranks, int rank) {
  return std::binary_search(ranks.begin(), ranks.end(), rank);
}

size_t PlaceOf(int rank, const std::vector<int>& members) {
  return std::lower_bound(members.begin(), members.end(), rank) - members.begin();
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
    : fusion_bytes_(fusion_bytes),
      joined_(size),
      last_submissions_(size),
      most_entries_(kEntriesKept) {
  Members all(size);
  for (int rank = 0; rank < size; ++rank) all[rank] = rank;
  AddProcessSet(0, std::move(all));
}

void Coordinator::AddProcessSet(int32_t id, std::vector<int> ranks) {
  process_sets_[id] = std::make_shared<const Members>(std::move(ranks));
  last_process_set_ = std::max(last_process_set_, id);
}

const Coordinator::Request* Coordinator::Entry::head() const {
  for (const auto& queue : waiting) {
    if (!queue.empty()) return &queue.front();
  }
  return nullptr;
}

size_t Coordinator::Entry::arrived() const {
  return std::count_if(waiting.begin(), waiting.end(),
                       [](const auto& queue) { return !queue.empty(); });
}

Coordinator::Entry& Coordinator::FindEntry(const TensorKey& key,
                                           const std::vector<int>& members) {
  if (entries_.size() >= most_entries_) ForgetIdleEntries();
  Entry& entry = entries_[key];
  if (entry.waiting.empty()) {
    entry.waiting.resize(members.size());
    entry.owed.resize(members.size());
  }
  return entry;
}

// Names that a program invents as it runs must not fill the memory.
void Coordinator::ForgetIdleEntries() {
  const auto empty = [](const auto& queue) { return queue.empty(); };
  for (auto it = entries_.begin(); it != entries_.end();) {
    const Entry& entry = it->second;
    const bool idle = std::all_of(entry.waiting.begin(), entry.waiting.end(), empty) &&
                      std::all_of(entry.owed.begin(), entry.owed.end(), empty);
    it = idle ? entries_.erase(it) : std::next(it);
  }
  most_entries_ = std::max(kEntriesKept, 2 * entries_.size());
}

void Coordinator::Submit(int rank, std::shared_ptr<const Description> description,
                         double now, bool duplicate, std::optional<std::string> input) {
  last_submissions_[rank] = description;
  last_submission_ = now;
  const TensorKey key = {description->process_set, description->name};
  const auto set = process_sets_.find(key.process_set);
  const std::string id = std::to_string(key.process_set);
  if (set == process_sets_.end()) {
    return FailOne(key, rank, "there is no process set " + id + " any more");
  }
  if (!Contains(*set->second, rank)) {
    return FailOne(key, rank,
                   "rank " + std::to_string(rank) + " is not in process set " + id);
  }
  const std::shared_ptr<const Members> members = set->second;
  Entry& entry = FindEntry(key, *members);
  const size_t place = PlaceOf(rank, *members);
  if (!entry.owed[place].empty()) {
    FailOne(key, rank, entry.owed[place].front());
    entry.owed[place].pop_front();
    return;
  }
  const bool joins = description->kind == Kind::kJoin;
  entry.waiting[place].push_back(
      {std::move(description), duplicate, now, ++submissions_, std::move(input)});
  if (entry.waiting[place].size() > 1) return;
  if (joins) Join(rank);
  Settle(key, &entry, members);
}

// Requests that wait for the rank can go on without it, or never will.
void Coordinator::Join(int rank) {
  joined_[rank] = true;
  joined_count_ += 1;
  for (auto& [key, entry] : entries_) {
    const std::shared_ptr<const Members>& members = process_sets_.at(key.process_set);
    if (!Contains(*members, rank)) continue;
    // The rank will not call these any more; a later call under the name is a new one.
    entry.owed[PlaceOf(rank, *members)].clear();
    const Request* const head = entry.head();
    const bool joins = head != nullptr && head->description->kind == Kind::kJoin;
    if (!joins) Settle(key, &entry, members);
  }
}

// Examines what the members wait for first: a departure, a mistake, or a match. Then
// examines what waits behind it.
void Coordinator::Settle(const TensorKey& key, Entry* entry,
                         const std::shared_ptr<const Members>& members) {
  while (const Request* head = entry->head()) {
    if (FailIfSomebodyLeft(key, entry, *members)) continue;
    const std::string wrong = WhatIsWrong(key, *entry, *members);
    if (!wrong.empty()) {
      FailHeads(key, entry, *members, wrong, Owe::kYes);
      continue;
    }
    const std::shared_ptr<const Description> description = head->description;
    std::vector<int> joined = JoinedBefore(*entry, *members, *description);
    if (!joined.empty() && !TakesZeros(*description)) {
      // The others' calls of this name are numbered by what they have met.
      FailHeads(key, entry, *members, JoinedText(*description, joined), Owe::kYes);
      continue;
    }
    if (entry->arrived() + joined.size() < members->size()) return;
    if (IsAgreement(description->kind)) {
      Agree(key, entry, *members);
      continue;
    }
    std::vector<std::pair<int, double>> times = Times(*entry, *members);
    settled_.push_back({key,
                        description,
                        members,
                        std::move(joined),
                        TakeHeads(entry),
                        {},
                        std::move(times)});
  }
}

// Takes each member's first waiting request. Returns their inputs if all gave one.
std::vector<std::string> Coordinator::TakeHeads(Entry* entry) {
  std::vector<std::string> inputs;
  inputs.reserve(entry->waiting.size());
  bool all = true;
  for (auto& queue : entry->waiting) {
    std::string& input = inputs.emplace_back();
    if (queue.empty()) continue;
    all = all && queue.front().input.has_value();
    if (all) input = std::move(*queue.front().input);
    queue.pop_front();
  }
  if (!all) inputs.clear();
  return inputs;
}

// When each member submitted its first waiting request.
std::vector<std::pair<int, double>> Coordinator::Times(
    const Entry& entry, const std::vector<int>& members) const {
  std::vector<std::pair<int, double>> times;
  for (size_t i = 0; wants_times_ && i < members.size(); ++i) {
    if (entry.waiting[i].empty()) continue;
    times.emplace_back(members[i], entry.waiting[i].front().since);
  }
  return times;
}

// Members that have joined without submitting what the others wait for first.
std::vector<int> Coordinator::JoinedBefore(const Entry& entry,
                                           const std::vector<int>& members,
                                           const Description& head) const {
  std::vector<int> joined;
  if (joined_count_ == 0 || head.kind == Kind::kJoin) return joined;
  for (size_t i = 0; i < members.size(); ++i) {
    if (entry.waiting[i].empty() && joined_[members[i]]) joined.push_back(members[i]);
  }
  return joined;
}

// All members have requested the same.
void Coordinator::Agree(const TensorKey& key, Entry* entry,
                        const std::vector<int>& members) {
  const std::shared_ptr<const Description> description = entry->head()->description;
  Decision decision;
  decision.type = Decision::Type::kAgree;
  decision.tensors = {key};
  decision.ranks = members;
  decision.agreed = description->kind;
  decision.members = description->members;
  std::string refusal;
  if (description->kind == Kind::kAddProcessSet) {
    refusal = AgreeOnAdding(*description, &decision);
  } else if (description->kind == Kind::kRemoveProcessSet) {
    refusal = AgreeOnRemoving(*description, &decision);
  } else {
    const auto last = std::max_element(
        entry->waiting.begin(), entry->waiting.end(),
        [](const auto& a, const auto& b) { return a.front().order < b.front().order; });
    decision.answer = members[last - entry->waiting.begin()];
    joined_.assign(joined_.size(), false);
    joined_count_ = 0;
  }
  if (!refusal.empty()) return FailHeads(key, entry, members, refusal, Owe::kNo);
  for (auto& queue : entry->waiting) queue.pop_front();
  settled_.push_back({key, nullptr, nullptr, {}, {}, std::move(decision), {}});
}

// Returns the reason against it, or "".
std::string Coordinator::AgreeOnAdding(const Description& description,
                                       Decision* decision) {
  for (const auto& [id, members] : process_sets_) {
    if (*members != description.members) continue;
    return "process set " + std::to_string(id) + " already has " + RankList(*members) +
           ". No two sets may have the same ranks";
  }
  decision->answer = last_process_set_ + 1;
  AddProcessSet(decision->answer, description.members);
  return "";
}

std::string Coordinator::AgreeOnRemoving(const Description& description,
                                         Decision* decision) {
  const auto set = std::find_if(
      process_sets_.begin(), process_sets_.end(),
      [&](const auto& other) { return *other.second == description.members; });
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
  for (auto it = entries_.begin(); it != entries_.end();) {
    it = it->first.process_set == id ? entries_.erase(it) : std::next(it);
  }
  process_sets_.erase(set);
  return "";
}

// Describes a waiting request of the set, as in "allreduce 'x' waits on rank 2", or "".
std::string Coordinator::WhatWaits(int32_t process_set) const {
  const std::vector<int>& members = *process_sets_.at(process_set);
  for (const auto& [key, entry] : entries_) {
    const Request* const head = entry.head();
    if (key.process_set != process_set || head == nullptr) continue;
    std::vector<int> waiting;
    for (size_t i = 0; i < members.size(); ++i) {
      if (!entry.waiting[i].empty()) waiting.push_back(members[i]);
    }
    return Title(*head->description) + " waits on " + RankList(waiting);
  }
  return "";
}

// Why the members' first requests cannot be one collective, or "".
std::string Coordinator::WhatIsWrong(const TensorKey& key, const Entry& entry,
                                     const std::vector<int>& members) const {
  std::vector<std::pair<int, const Description*>> heads;
  bool agree = true;
  for (size_t i = 0; i < members.size(); ++i) {
    if (entry.waiting[i].empty()) continue;
    const Request& head = entry.waiting[i].front();
    if (head.duplicate) {
      return Title(*head.description) + " was submitted on rank " +
             std::to_string(members[i]) +
             " by a second op, or by another call of the same op, while the first was "
             "pending. Give each op its own name, or make the calls from one thread";
    }
    heads.emplace_back(members[i], head.description.get());
    // Equal descriptions are usually the same object.
    const Description* first = heads.front().second;
    agree =
        agree && (head.description.get() == first || head.description->Matches(*first));
  }
  if (agree) return "";
  if (IsAgreement(heads.front().second->kind)) {
    return "the ranks' calls differ (" + WhatEachGave(heads) +
           "). Every rank must add and remove the same process sets in the same order";
  }
  return Quoted(key.name) + " differs between ranks (" + WhatEachGave(heads) +
         "). Every rank must submit the same under one name";
}

// Fails the first waiting request of each member. Members that are owed the failure get
// it when they come to the name.
void Coordinator::FailHeads(const TensorKey& key, Entry* entry,
                            const std::vector<int>& members, const std::string& text,
                            Owe owe, bool departed) {
  Decision failure;
  failure.type = Decision::Type::kFail;
  failure.tensors = {key};
  failure.departed = departed;
  failure.text = text;
  for (size_t i = 0; i < members.size(); ++i) {
    const int member = members[i];
    if (entry->waiting[i].empty()) {
      if (owe == Owe::kYes && !joined_[member]) entry->owed[i].push_back(text);
      continue;
    }
    if (entry->waiting[i].front().description->kind == Kind::kJoin && joined_[member]) {
      joined_[member] = false;
      joined_count_ -= 1;
    }
    failure.ranks.push_back(member);
    entry->waiting[i].pop_front();
  }
  settled_.push_back({key, nullptr, nullptr, {}, {}, std::move(failure), {}});
}

void Coordinator::FailOne(const TensorKey& key, int rank, const std::string& text) {
  Decision failure;
  failure.type = Decision::Type::kFail;
  failure.tensors = {key};
  failure.ranks = {rank};
  failure.text = text;
  settled_.push_back({key, nullptr, nullptr, {}, {}, std::move(failure), {}});
}

bool Coordinator::FailIfSomebodyLeft(const TensorKey& key, Entry* entry,
                                     const std::vector<int>& members) {
  for (const auto& [rank, how] : departures_) {
    if (!Contains(members, rank)) continue;
    const Description& head = *entry->head()->description;
    const std::string what = IsAgreement(head.kind) ? Title(head) : Quoted(key.name);
    FailHeads(key, entry, members, what + " cannot be completed: " + how, Owe::kNo,
              true);
    return true;
  }
  return false;
}

void Coordinator::Leave(int rank, const std::string& how) {
  departures_.emplace_back(rank, how);
  if (joined_[rank]) joined_count_ -= 1;
  joined_[rank] = false;
  for (auto& [key, entry] : entries_) {
    const std::shared_ptr<const Members>& members = process_sets_.at(key.process_set);
    if (!Contains(*members, rank)) continue;
    entry.waiting[PlaceOf(rank, *members)].clear();
    Settle(key, &entry, members);
  }
}

void Coordinator::Take(Settled* settled, Decision* decision) {
  decision->tensors.push_back(std::move(settled->key));
  if (!settled->since.empty()) {
    decision->requests.push_back({settled->description, std::move(settled->since)});
  }
  if (!settled->inputs.empty()) {
    decision->given.push_back({settled->description, std::move(settled->inputs)});
  }
  if (settled->joined.empty()) return;
  decision->zeros.push_back({settled->description, std::move(settled->joined)});
}

bool Coordinator::Next(Decision* decision) {
  if (settled_.empty()) return false;
  if (settled_.front().description == nullptr) {
    *decision = std::move(settled_.front().decision);
    settled_.pop_front();
    return true;
  }
  const std::shared_ptr<const Description> first = settled_.front().description;
  *decision = Decision();
  decision->type = Decision::Type::kRun;
  decision->ranks = *settled_.front().members;
  Take(&settled_.front(), decision);
  settled_.pop_front();
  if (first->kind != Kind::kAllreduce) return true;
  decision->bytes = first->bytes();
  std::deque<Settled> left;
  for (; !settled_.empty() && settled_.front().description != nullptr &&
         left.size() < kMostPassedOver;
       settled_.pop_front()) {
    Settled& next = settled_.front();
    const int64_t more = next.description->bytes();
    const bool behind_its_like =
        std::any_of(left.begin(), left.end(),
                    [&](const Settled& other) { return other.key == next.key; });
    const bool alike = next.inputs.empty() == decision->given.empty() &&
                       CanFuse(*first, *next.description);
    if (decision->bytes + more > fusion_bytes_ || !alike || behind_its_like) {
      left.push_back(std::move(next));
      continue;
    }
    decision->bytes += more;
    Take(&next, decision);
  }
  settled_.insert(settled_.begin(), std::make_move_iterator(left.begin()),
                  std::make_move_iterator(left.end()));
  return true;
}

std::string Coordinator::LastSubmission(int rank) const {
  return last_submissions_[rank] == nullptr ? "" : Title(*last_submissions_[rank]);
}

std::vector<Stall> Coordinator::Stalls() const {
  std::vector<std::pair<uint64_t, Stall>> found;
  for (const auto& [key, entry] : entries_) {
    const std::vector<int>& members = *process_sets_.at(key.process_set);
    // The oldest of the first waiting requests represents the name.
    const Request* oldest = nullptr;
    Stall stall = {key, Kind::kAllreduce, 0, {}, {}};
    for (size_t i = 0; i < members.size(); ++i) {
      if (entry.waiting[i].empty()) {
        if (!joined_[members[i]]) stall.missing.push_back(members[i]);
        continue;
      }
      stall.waiting.push_back(members[i]);
      const Request& head = entry.waiting[i].front();
      if (oldest == nullptr || head.order < oldest->order) oldest = &head;
    }
    if (oldest == nullptr) continue;
    stall.kind = oldest->description->kind;
    // Joined ranks wait for as long as the others have data. This is no stall while any
    // of those submits something.
    const bool joins = stall.kind == Kind::kJoin;
    stall.since = joins ? std::max(oldest->since, last_submission_) : oldest->since;
    found.emplace_back(oldest->order, std::move(stall));
  }
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Stall> stalls;
  for (auto& [order, stall] : found) stalls.push_back(std::move(stall));
  return stalls;
}

}  // namespace keras_hvd
