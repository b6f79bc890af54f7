#include "tf_ops/transport/topology.h"

#include <algorithm>
#include <unordered_map>

namespace keras_hvd {

std::string RankList(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

int IndexOf(const std::vector<int>& ranks, int rank) {
  const auto found = std::lower_bound(ranks.begin(), ranks.end(), rank);
  if (found == ranks.end() || *found != rank) return -1;
  return static_cast<int>(found - ranks.begin());
}

Topology::Topology(int rank, const std::vector<int>& hosts, int fan_out)
    : rank_(rank), fan_out_(fan_out) {
  std::unordered_map<int, int> numbers;
  for (int other = 0; other < static_cast<int>(hosts.size()); ++other) {
    const auto [number, is_new] =
        numbers.try_emplace(hosts[other], static_cast<int>(numbers.size()));
    if (is_new) ranks_of_.emplace_back();
    std::vector<int>& ranks = ranks_of_[number->second];
    host_of_.push_back(number->second);
    local_index_.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(other);
  }
}

bool Topology::is_homogeneous() const {
  return std::all_of(ranks_of_.begin(), ranks_of_.end(), [this](const auto& ranks) {
    return ranks.size() == ranks_of_.front().size();
  });
}

int Topology::substitute_parent_of(int host) const {
  if (host <= 1) return -1;
  return parent_of(host) == 0 ? 1 : parent_of(parent_of(host));
}

std::vector<int> Topology::children_of(int host) const {
  std::vector<int> children;
  const int first = host * fan_out_ + 1;
  for (int child = first; child < std::min(first + fan_out_, hosts()); ++child) {
    children.push_back(child);
  }
  return children;
}

std::vector<int> Topology::ranks_below(int host) const {
  std::vector<int> ranks;
  // The hosts of one level of the tree have consecutive numbers.
  int first = host, last = host;
  while (first < hosts()) {
    for (int each = first; each <= std::min(last, hosts() - 1); ++each) {
      ranks.insert(ranks.end(), ranks_of_[each].begin(), ranks_of_[each].end());
    }
    first = first * fan_out_ + 1;
    last = (last + 1) * fan_out_;
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

}  // namespace keras_hvd
