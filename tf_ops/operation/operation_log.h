// A rank's record of its last operations, which the others can read, so that after a
// death or a stall one report can say where everybody was.
#ifndef KERAS_HVD_TF_OPS_OPERATION_OPERATION_LOG_H_
#define KERAS_HVD_TF_OPS_OPERATION_OPERATION_LOG_H_

#include <cstdint>
#include <string>

#include "tf_ops/operation/description.h"
#include "tf_ops/transport/job_state.h"

namespace keras_hvd {

enum class Phase : uint32_t { kSubmitted = 0, kRunning = 1, kDone = 2, kFailed = 3 };

class OperationLog {
 public:
  explicit OperationLog(OperationHistory* history) : history_(*history) {}

  // Adds an operation and returns its number. One thread at a time.
  uint64_t Add(const Description& description);
  // Notes how far an operation is, if it is still among those kept.
  void Update(uint64_t number, Phase phase);

 private:
  OperationHistory& history_;
};

// What each rank did last: a line for each, with a line break before it.
std::string ReportOperations(JobState* job);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_OPERATION_OPERATION_LOG_H_
