// What connects a rank to the others of its job.
#ifndef KERAS_HVD_TF_OPS_TRANSPORT_WORLD_H_
#define KERAS_HVD_TF_OPS_TRANSPORT_WORLD_H_

#include <memory>

#include "tf_ops/transport/channel.h"
#include "tf_ops/transport/job_state.h"
#include "tf_ops/transport/segment.h"

namespace keras_hvd {

struct World {
  std::shared_ptr<JobState> job;
  std::shared_ptr<Channels> channels;
  // What collectives in host memory pass tensors through.
  std::shared_ptr<Segment> segment;
};

// That of ranks that share a segment.
World SharedMemoryWorld(std::shared_ptr<Segment> segment, int rank);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_TRANSPORT_WORLD_H_
