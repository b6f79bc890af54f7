// See job_failure.h.
#include "tf_ops/engine/job_failure.h"

#include <string>

#include "tf_ops/engine/log.h"
#include "tf_ops/engine/operation_log.h"

namespace keras_hvd {
namespace {

// What the failure of another rank means for this one; other failures say it
// themselves.
std::string Advice(Code code) {
  if (code != Code::kRankFailed) return ". The job cannot go on";
  return ". The job cannot go on: see that rank's output for the reason, then start it "
         "again";
}

}  // namespace

Status ReasonOfEnd(const Segment& segment) {
  const Status failure = segment.Failure();
  if (failure.ok()) return {Code::kShutDown, kShutDownHere};
  return {failure.code, failure.message + Advice(failure.code)};
}

void ReportFailureOnce(Segment* segment, int rank) {
  // A rank that is crashing itself may not live to finish the report.
  if (segment->block(rank).departure.load() != 0) return;
  if (segment->header().report_claimed.exchange(1) != 0) return;
  Log(rank, LogLevel::kError,
      segment->Failure().message +
          "\nWhat each rank did last:" + ReportOperations(segment));
}

}  // namespace keras_hvd
