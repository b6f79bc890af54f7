// See coordinator.h.
#include "tf_ops/engine/coordinator.h"

#include <algorithm>
#include <utility>

namespace keras_hvd {
namespace {

// How many requests that do not fit into a batch are passed over in search of ones that
// do: looking at all of them for every batch would take time with the square of them.
constexpr size_t kMostPassedOver = 64;

// With fewer names than this, none is forgotten.
constexpr size_t kEntriesKept = 4096;

std::string RankList(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

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

}  // namespace

Coordinator::Coordinator(int size, int64_t fusion_bytes)
    : fusion_bytes_(fusion_bytes),
      last_submissions_(size),
      most_entries_(kEntriesKept) {
  std::vector<int> all(size);
  for (int rank = 0; rank < size; ++rank) all[rank] = rank;
  process_sets_[0] = std::move(all);
}

void Coordinator::AddProcessSet(int32_t id, std::vector<int> ranks) {
  process_sets_[id] = std::move(ranks);
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

// Names that a program makes up as it goes must not fill the memory.
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
                         double now, bool duplicate) {
  last_submissions_[rank] = description;
  const TensorKey key = {description->process_set, description->name};
  const auto set = process_sets_.find(key.process_set);
  const bool member = set != process_sets_.end() &&
                      std::binary_search(set->second.begin(), set->second.end(), rank);
  if (!member) {
    return FailOne(key, rank,
                   Title(*description) + ": rank " + std::to_string(rank) +
                       " is not in process set " + std::to_string(key.process_set));
  }
  const std::vector<int>& members = set->second;
  Entry& entry = FindEntry(key, members);
  const size_t place =
      std::lower_bound(members.begin(), members.end(), rank) - members.begin();
  if (!entry.owed[place].empty()) {
    FailOne(key, rank, entry.owed[place].front());
    entry.owed[place].pop_front();
    return;
  }
  entry.waiting[place].push_back(
      {std::move(description), duplicate, now, ++submissions_});
  if (entry.waiting[place].size() == 1) Settle(key, &entry, members);
}

// Looks at what the members wait for first: a departure, a mistake, or a match. What
// waits behind it is looked at in turn.
void Coordinator::Settle(const TensorKey& key, Entry* entry,
                         const std::vector<int>& members) {
  while (true) {
    const size_t arrived =
        std::count_if(entry->waiting.begin(), entry->waiting.end(),
                      [](const auto& queue) { return !queue.empty(); });
    if (arrived == 0) return;
    if (FailIfSomebodyLeft(key, entry, members)) continue;
    const std::string wrong = WhatIsWrong(key, *entry, members);
    if (!wrong.empty()) {
      FailHeads(key, entry, members, wrong, true);
      continue;
    }
    if (arrived < members.size()) return;
    settled_.push_back({key, entry->waiting.front().front().description, {}});
    for (auto& queue : entry->waiting) queue.pop_front();
  }
}

// What keeps the members' first requests from being one collective, or "".
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
             " by a second op while the first was under way. Give each op a name of "
             "its "
             "own";
    }
    heads.emplace_back(members[i], head.description.get());
    // Equal descriptions are usually one and the same object.
    const Description* first = heads.front().second;
    agree =
        agree && (head.description.get() == first || head.description->Matches(*first));
  }
  if (agree) return "";
  return "'" + key.name + "' differs between ranks (" + WhatEachGave(heads) +
         "). Every rank must submit the same under one name";
}

// Ends what each member waits for first. With `owe`, members that have not come yet get
// the same failure when they do.
void Coordinator::FailHeads(const TensorKey& key, Entry* entry,
                            const std::vector<int>& members, const std::string& text,
                            bool owe) {
  Decision failure;
  failure.type = Decision::Type::kFail;
  failure.tensors = {key};
  failure.departed = !owe;
  failure.text = text;
  for (size_t i = 0; i < members.size(); ++i) {
    if (!entry->waiting[i].empty()) {
      failure.ranks.push_back(members[i]);
      entry->waiting[i].pop_front();
    } else if (owe) {
      entry->owed[i].push_back(text);
    }
  }
  settled_.push_back({key, nullptr, std::move(failure)});
}

void Coordinator::FailOne(const TensorKey& key, int rank, const std::string& text) {
  Decision failure;
  failure.type = Decision::Type::kFail;
  failure.tensors = {key};
  failure.ranks = {rank};
  failure.text = text;
  settled_.push_back({key, nullptr, std::move(failure)});
}

bool Coordinator::FailIfSomebodyLeft(const TensorKey& key, Entry* entry,
                                     const std::vector<int>& members) {
  for (const auto& [rank, how] : departures_) {
    if (!std::binary_search(members.begin(), members.end(), rank)) continue;
    FailHeads(key, entry, members, "'" + key.name + "' cannot be completed: " + how,
              false);
    return true;
  }
  return false;
}

void Coordinator::Leave(int rank, const std::string& how) {
  departures_.emplace_back(rank, how);
  for (auto& [key, entry] : entries_) {
    const std::vector<int>& members = process_sets_[key.process_set];
    const auto place = std::lower_bound(members.begin(), members.end(), rank);
    if (place == members.end() || *place != rank) continue;
    entry.waiting[place - members.begin()].clear();
    Settle(key, &entry, members);
  }
}

bool Coordinator::Fusable(const Description& first, const Description& other) {
  return other.kind == Kind::kAllreduce && first.process_set == other.process_set &&
         first.reduction == other.reduction;
}

bool Coordinator::Next(Decision* decision) {
  if (settled_.empty()) return false;
  if (settled_.front().description == nullptr) {
    *decision = std::move(settled_.front().failure);
    settled_.pop_front();
    return true;
  }
  const std::shared_ptr<const Description> first = settled_.front().description;
  *decision = Decision();
  decision->type = Decision::Type::kRun;
  decision->ranks = process_sets_[first->process_set];
  decision->tensors.push_back(std::move(settled_.front().key));
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
    if (decision->bytes + more > fusion_bytes_ || !Fusable(*first, *next.description) ||
        behind_its_like) {
      left.push_back(std::move(next));
      continue;
    }
    decision->bytes += more;
    decision->tensors.push_back(std::move(next.key));
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
    const std::vector<int>& members = process_sets_.at(key.process_set);
    // The oldest of the requests that are next in line speaks for the name.
    const Request* oldest = nullptr;
    Stall stall = {key, Kind::kAllreduce, 0, {}, {}};
    for (size_t i = 0; i < members.size(); ++i) {
      const bool waits = !entry.waiting[i].empty();
      (waits ? stall.waiting : stall.missing).push_back(members[i]);
      if (!waits) continue;
      const Request& head = entry.waiting[i].front();
      if (oldest == nullptr || head.order < oldest->order) oldest = &head;
    }
    if (oldest == nullptr) continue;
    stall.kind = oldest->description->kind;
    stall.since = oldest->since;
    found.emplace_back(oldest->order, std::move(stall));
  }
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Stall> stalls;
  for (auto& [order, stall] : found) stalls.push_back(std::move(stall));
  return stalls;
}

}  // namespace keras_hvd
