#include "tf_ops/operation/process_sets.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace keras_hvd {

ProcessSets::ProcessSets(int rank, int size, int32_t last_earlier)
    : rank_(rank), last_earlier_(last_earlier) {
  std::vector<int>& all = sets_[0];
  all.resize(size);
  std::iota(all.begin(), all.end(), 0);
}

void ProcessSets::Add(int32_t id, std::vector<int> members) {
  sets_[id] = std::move(members);
}

void ProcessSets::Remove(int32_t id) { sets_.erase(id); }

const std::vector<int>& ProcessSets::MembersOf(int32_t id) const {
  static const std::vector<int> kNone;
  const auto set = sets_.find(id);
  return set == sets_.end() ? kNone : set->second;
}

std::string ProcessSets::ThereIsNone(int32_t id) const {
  std::string text = "there is no process set " + std::to_string(id) + ": it ";
  if (id <= 0 || id > last_earlier_) return text + "was not added, or has been removed";
  return text + "belonged to an earlier job of this process. Add the set to this job " +
         "with keras_hvd.add_process_set(), and trace functions that use it again, " +
         "since they hold its number";
}

Status ProcessSets::Find(int32_t id, std::vector<int>* members) const {
  const auto set = sets_.find(id);
  if (set == sets_.end()) return Status::InvalidArgument(ThereIsNone(id));
  *members = set->second;
  return Status::Ok();
}

bool ProcessSets::HasOneWithoutThisRank() const {
  return std::any_of(sets_.begin(), sets_.end(),
                     [this](const auto& set) { return !Contains(set.second, rank_); });
}

Status ProcessSets::Check(const Description& description) const {
  const int32_t id = description.process_set;
  const auto set = sets_.find(id);
  const std::string rank = std::to_string(rank_);
  if (set == sets_.end()) {
    return Status::InvalidArgument(Title(description) + " failed on rank " + rank +
                                   ": " + ThereIsNone(id));
  }
  const std::vector<int>& members = set->second;
  const bool is_member = Contains(members, rank_);
  const bool has_root =
      description.kind != Kind::kBroadcast || Contains(members, description.root);
  if (is_member && has_root) return Status::Ok();
  const std::string who = is_member ? " failed on rank " + rank + ": root_rank " +
                                          std::to_string(description.root)
                                    : " failed: rank " + rank;
  return Status::InvalidArgument(Title(description) + who + " is not in process set " +
                                 std::to_string(id) + " (" + RankList(members) + ")");
}

}  // namespace keras_hvd
