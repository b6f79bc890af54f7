// Reports the failure of a job: to each request that it ends, and once for all ranks.
#pragma once

#include "tf_ops/transport/job_state.h"
#include "tf_ops/transport/status.h"

namespace keras_hvd {

// The reason why requests end on a rank that has left the job.
inline constexpr char kShutDownHere[] = "keras_hvd was shut down on this rank";

// The reason why requests end: the job has failed, with advice, or this rank has left
// it.
Status ReasonOfEnd(const JobState& job);

// Logs the failure, and each rank's last operations, unless another rank does or has.
void ReportFailureOnce(JobState* job);

}  // namespace keras_hvd
