// A request as leaders and the coordinator see it: of all ranks that submitted it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tf_ops/coordination/rank_set.h"
#include "tf_ops/operation/description.h"
#include "tf_ops/transport/doorbell.h"

namespace keras_hvd {

// A request that `ranks` have submitted equally, each once.
struct MergedSubmission {
  std::shared_ptr<const Description> description;
  bool duplicate = false;  // another op of the rank has the name; only for one rank
  RankSet ranks;           // not empty
  std::vector<Clock::time_point> submitted;  // of each rank; empty: nobody asks for it
  std::vector<std::string> inputs;  // of each rank, or empty; see inline_tensors.h

  // Whether it has nothing but a description and its ranks.
  bool is_plain() const { return !duplicate && submitted.empty() && inputs.empty(); }
};

using Descriptions = std::vector<std::shared_ptr<const Description>>;

// Plain requests that `ranks` have submitted equally, in this order: of one process
// set, and no agreements. Most of a step travels in a few of these, alike in each step
// and from each host, so a reader need not look at each request anew.
struct SubmissionRun {
  std::shared_ptr<const Descriptions> descriptions;  // not empty
  RankSet ranks;                                     // not empty
};

}  // namespace keras_hvd
