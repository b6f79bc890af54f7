// The process sets that this rank knows, and the requests that they rule out.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tf_ops/operation/description.h"
#include "tf_ops/transport/status.h"

namespace keras_hvd {

class ProcessSets {
 public:
  // Starts with set 0, which holds all ranks. Numbers up to `last_earlier` are those of
  // sets of this process' earlier jobs.
  ProcessSets(int rank, int size, int32_t last_earlier = 0);

  void Add(int32_t id, std::vector<int> members);
  void Remove(int32_t id);

  // In ascending order; empty if there is no such set.
  const std::vector<int>& MembersOf(int32_t id) const;
  Status Find(int32_t id, std::vector<int>* members) const;
  int32_t last_earlier() const { return last_earlier_; }
  // Whether some set does not contain this rank.
  bool HasOneWithoutThisRank() const;
  // Returns an error for a request that the peers must never wait for.
  Status Check(const Description& description) const;

 private:
  std::string ThereIsNone(int32_t id) const;

  const int rank_;
  const int32_t last_earlier_;
  std::map<int32_t, std::vector<int>> sets_;
};

}  // namespace keras_hvd
