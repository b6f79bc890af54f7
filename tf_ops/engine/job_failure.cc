#include "tf_ops/engine/job_failure.h"

#include <string>

#include "tf_ops/operation/log.h"
#include "tf_ops/operation/operation_log.h"

namespace keras_hvd {
namespace {

// Advice for another rank's failure. Other failures explain themselves.
std::string Advice(Code code) {
  if (code != Code::kRankFailed) return ". The job cannot go on";
  return ". The job cannot go on: see that rank's output for the reason, then start it "
         "again";
}

}  // namespace

Status ReasonOfEnd(const JobState& job) {
  const Status failure = job.Failure();
  if (failure.ok()) return {Code::kShutDown, kShutDownHere};
  return {failure.code, failure.message + Advice(failure.code)};
}

void ReportFailureOnce(JobState* job) {
  // A crashing rank may not live to finish the report.
  if (job->has_departed()) return;
  // Other hosts hear of it first: a caller that gets the error here may end the process
  // at once.
  job->Poll();
  if (!job->ClaimFailureReport()) return;
  Log(job->rank(), LogLevel::kError,
      job->Failure().message + "\nWhat each rank did last:" + ReportOperations(job));
}

}  // namespace keras_hvd
