// The ranks that share a host, and so its memory and its cores, and the connections of
// the hosts.
//
// The lowest rank of a host is its leader: it speaks for the host. Leaders form a tree
// whose root is the coordinator's host.
#pragma once

#include <string>
#include <vector>

namespace keras_hvd {

// "rank 0"; "ranks 0, 2".
std::string RankList(const std::vector<int>& ranks);
// The place of a rank among ascending ones, or -1.
int IndexOf(const std::vector<int>& ranks, int rank);
inline bool Contains(const std::vector<int>& ranks, int rank) {
  return IndexOf(ranks, rank) >= 0;
}

// One rank's view.
class Topology {
 public:
  // How many hosts a leader has directly below it in the tree.
  static constexpr int kFanOut = 8;

  // `hosts`: something that is equal for ranks of one host and different otherwise.
  // Hosts are numbered from 0 in the order of their leaders.
  Topology(int rank, const std::vector<int>& hosts, int fan_out = kFanOut);
  static Topology OneHost(int rank, int size) {
    return Topology(rank, std::vector<int>(size));
  }

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(host_of_.size()); }
  int hosts() const { return static_cast<int>(ranks_of_.size()); }

  // ---- Hosts and their ranks

  int host() const { return host_of_[rank_]; }
  int host_of(int rank) const { return host_of_[rank]; }
  const std::vector<int>& host_of_ranks() const { return host_of_; }
  bool is_local(int rank) const { return host_of_[rank] == host(); }
  // The ranks of a host, ascending.
  const std::vector<int>& ranks_of(int host) const { return ranks_of_[host]; }
  // The ranks on this rank's host, ascending, including this one.
  const std::vector<int>& local_ranks() const { return ranks_of_[host()]; }
  int local_size() const { return static_cast<int>(local_ranks().size()); }
  // Whether all hosts have equally many.
  bool is_homogeneous() const;
  // The index of a rank among those of its host.
  int local_index(int rank) const { return local_index_[rank]; }

  // ---- The tree of leaders

  int leader_of(int host) const { return ranks_of_[host].front(); }
  int leader() const { return leader_of(host()); }
  bool is_leader() const { return leader() == rank_; }
  // The host above this one in the tree, or -1 for the root.
  int parent() const { return parent_of(host()); }
  int parent_of(int host) const { return host == 0 ? -1 : (host - 1) / fan_out_; }
  // The host that one turns to if the host above it is lost: the one above that, or
  // host 1 for the others directly below the root; -1 if there is none.
  int substitute_parent_of(int host) const;
  // The hosts directly below this one, or below another one.
  std::vector<int> children() const { return children_of(host()); }
  std::vector<int> children_of(int host) const;
  // The ranks of a host and of all hosts below it, ascending.
  std::vector<int> ranks_below(int host) const;

 private:
  int rank_;
  int fan_out_;
  std::vector<int> host_of_;
  std::vector<int> local_index_;
  std::vector<std::vector<int>> ranks_of_;
};

}  // namespace keras_hvd
