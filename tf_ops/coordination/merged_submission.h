// A request as leaders and the coordinator see it: of all ranks that submitted it.
#ifndef KERAS_HVD_TF_OPS_COORDINATION_MERGED_SUBMISSION_H_
#define KERAS_HVD_TF_OPS_COORDINATION_MERGED_SUBMISSION_H_

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
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COORDINATION_MERGED_SUBMISSION_H_
