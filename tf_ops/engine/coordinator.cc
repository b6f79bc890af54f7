// See coordinator.h.
#include "tf_ops/engine/coordinator.h"

#include <algorithm>
#include <utility>

namespace keras_hvd {
namespace {

std::string RankList(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

// "ranks 0, 1: Sum of float32[3]; rank 2: Sum of float32[4]".
std::string WhatEachGave(const std::vector<std::pair<int, const Description*>>& given) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (const auto& [rank, description] : given) {
    std::string details =
        std::string(Name(description->kind)) + " of " + Details(*description);
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
    : fusion_bytes_(fusion_bytes), departures_(size), last_submissions_(size) {
  std::vector<int> all(size);
  for (int rank = 0; rank < size; ++rank) all[rank] = rank;
  process_sets_[0] = std::move(all);
}

void Coordinator::AddProcessSet(int32_t id, std::vector<int> ranks) {
  process_sets_[id] = std::move(ranks);
}

Coordinator::Entry& Coordinator::FindEntry(const TensorKey& key,
                                           const std::vector<int>& members) {
  Entry& entry = entries_[key];
  if (entry.waiting.empty()) {
    entry.waiting.resize(members.size());
    entry.owed.resize(members.size());
  }
  return entry;
}

void Coordinator::Submit(int rank, std::shared_ptr<const Description> description,
                         double now) {
  last_submissions_[rank] = Title(*description);
  const TensorKey key = {description->process_set, description->name};
  const auto set = process_sets_.find(key.process_set);
  const bool member = set != process_sets_.end() &&
                      std::binary_search(set->second.begin(), set->second.end(), rank);
  if (!member) {
    return FailOne(key, rank,
                   Title(*description) + ": rank " + std::to_string(rank) +
                       " is not in process set " + std::to_string(key.process_set),
                   false);
  }
  const std::vector<int>& members = set->second;
  Entry& entry = FindEntry(key, members);
  const size_t place =
      std::lower_bound(members.begin(), members.end(), rank) - members.begin();
  if (!entry.owed[place].empty()) {
    FailOne(key, rank, entry.owed[place].front(), false);
    entry.owed[place].pop_front();
    return;
  }
  const bool first = std::all_of(entry.waiting.begin(), entry.waiting.end(),
                                 [](const auto& queue) { return queue.empty(); });
  if (first) {
    entry.since = now;
    entry.order = ++submissions_;
  }
  entry.waiting[place].push_back(std::move(description));
  if (entry.waiting[place].size() > 1) return;
  Settle(key, &entry, members);
}

// Looks at what the members wait for first: a mismatch, a departure, or a match. What
// waits behind it is looked at in turn.
void Coordinator::Settle(const TensorKey& key, Entry* entry,
                         const std::vector<int>& members) {
  while (true) {
    std::vector<std::pair<int, const Description*>> heads;
    for (size_t i = 0; i < members.size(); ++i) {
      if (entry->waiting[i].empty()) continue;
      heads.emplace_back(members[i], entry->waiting[i].front().get());
    }
    if (heads.empty()) return;
    const bool agree = std::all_of(heads.begin(), heads.end(), [&](const auto& head) {
      return head.second->Matches(*heads.front().second);
    });
    if (!agree) {
      FailHeads(key, entry, members,
                "'" + key.name + "' differs between ranks (" + WhatEachGave(heads) +
                    "). Every rank must submit the same under one name",
                true);
      continue;
    }
    if (heads.size() < members.size()) {
      if (FailIfSomebodyLeft(key, entry, members)) continue;
      return;
    }
    ready_.push_back({key, entry->waiting.front().front()});
    for (auto& queue : entry->waiting) queue.pop_front();
  }
}

// Ends what each member waits for first. With `owe`, members that have not come yet get
// the same failure when they do.
void Coordinator::FailHeads(const TensorKey& key, Entry* entry,
                            const std::vector<int>& members, const std::string& text,
                            bool owe) {
  Decision decision;
  decision.type = Decision::Type::kFail;
  decision.tensors = {key};
  decision.departed = !owe;
  decision.text = text;
  for (size_t i = 0; i < members.size(); ++i) {
    if (!entry->waiting[i].empty()) {
      decision.ranks.push_back(members[i]);
      entry->waiting[i].pop_front();
    } else if (owe) {
      entry->owed[i].push_back(text);
    }
  }
  failures_.push_back(std::move(decision));
}

void Coordinator::FailOne(const TensorKey& key, int rank, const std::string& text,
                          bool departed) {
  Decision decision;
  decision.type = Decision::Type::kFail;
  decision.tensors = {key};
  decision.ranks = {rank};
  decision.departed = departed;
  decision.text = text;
  failures_.push_back(std::move(decision));
}

bool Coordinator::FailIfSomebodyLeft(const TensorKey& key, Entry* entry,
                                     const std::vector<int>& members) {
  for (size_t i = 0; i < members.size(); ++i) {
    const std::string& departure = departures_[members[i]];
    if (departure.empty() || !entry->waiting[i].empty()) continue;
    FailHeads(key, entry, members,
              "'" + key.name + "' cannot be completed: " + departure, false);
    return true;
  }
  return false;
}

void Coordinator::Duplicate(int rank, const Description& description) {
  const TensorKey key = {description.process_set, description.name};
  const auto entry = entries_.find(key);
  const auto set = process_sets_.find(key.process_set);
  if (entry == entries_.end() || set == process_sets_.end()) return;
  FailHeads(key, &entry->second, set->second,
            Title(description) + " was submitted on rank " + std::to_string(rank) +
                " by a second op while the first was under way. Give each op a name of "
                "its own",
            true);
  Settle(key, &entry->second, set->second);
}

void Coordinator::Leave(int rank, const std::string& how) {
  departures_[rank] = how;
  for (auto& [key, entry] : entries_) {
    const std::vector<int>& members = process_sets_[key.process_set];
    if (std::binary_search(members.begin(), members.end(), rank)) {
      Settle(key, &entry, members);
    }
  }
}

bool Coordinator::Fusable(const Description& first, const Description& other) {
  return other.kind == Kind::kAllreduce && first.process_set == other.process_set &&
         first.reduction == other.reduction;
}

bool Coordinator::Next(Decision* decision) {
  *decision = Decision();
  if (!failures_.empty()) {
    *decision = std::move(failures_.front());
    failures_.pop_front();
    return true;
  }
  if (ready_.empty()) return false;
  const std::shared_ptr<const Description> first = ready_.front().description;
  decision->type = Decision::Type::kRun;
  decision->ranks = process_sets_[first->process_set];
  decision->tensors.push_back(std::move(ready_.front().key));
  ready_.pop_front();
  if (first->kind != Kind::kAllreduce) return true;
  int64_t bytes = first->bytes();
  for (auto it = ready_.begin(); it != ready_.end();) {
    const int64_t more = it->description->bytes();
    if (bytes + more > fusion_bytes_ || !Fusable(*first, *it->description)) {
      ++it;
      continue;
    }
    bytes += more;
    decision->tensors.push_back(std::move(it->key));
    it = ready_.erase(it);
  }
  return true;
}

std::vector<Stall> Coordinator::Stalls() const {
  std::vector<std::pair<uint64_t, Stall>> found;
  for (const auto& [key, entry] : entries_) {
    const std::vector<int>& members = process_sets_.at(key.process_set);
    Stall stall = {key, Kind::kAllreduce, entry.since, {}, {}};
    for (size_t i = 0; i < members.size(); ++i) {
      const bool waits = !entry.waiting[i].empty();
      (waits ? stall.waiting : stall.missing).push_back(members[i]);
      if (waits) stall.kind = entry.waiting[i].front()->kind;
    }
    if (!stall.waiting.empty()) found.emplace_back(entry.order, std::move(stall));
  }
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Stall> stalls;
  for (auto& [order, stall] : found) stalls.push_back(std::move(stall));
  return stalls;
}

}  // namespace keras_hvd
