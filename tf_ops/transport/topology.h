// Which ranks share a host, and so its memory and its cores.
#ifndef KERAS_HVD_TF_OPS_TRANSPORT_TOPOLOGY_H_
#define KERAS_HVD_TF_OPS_TRANSPORT_TOPOLOGY_H_

#include <vector>

namespace keras_hvd {

// One rank's view.
class Topology {
 public:
  // `hosts`: the number of each rank's host.
  Topology(int rank, const std::vector<int>& hosts) {
    for (int other = 0; other < static_cast<int>(hosts.size()); ++other) {
      if (hosts[other] == hosts[rank]) local_ranks_.push_back(other);
    }
  }
  static Topology OneHost(int rank, int size) {
    return Topology(rank, std::vector<int>(size));
  }

  // The ranks on this rank's host, ascending, including this one.
  const std::vector<int>& local_ranks() const { return local_ranks_; }
  int local_size() const { return static_cast<int>(local_ranks_.size()); }

 private:
  std::vector<int> local_ranks_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_TRANSPORT_TOPOLOGY_H_
