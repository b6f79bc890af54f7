// A rank's record of its last operations, readable by the other ranks: after a death or
// a stall, one report can say where every rank was.
#pragma once

#include <cstdint>
#include <string>

#include "tf_ops/operation/description.h"
#include "tf_ops/transport/job_state.h"

namespace keras_hvd {

enum class Phase : uint32_t { kSubmitted = 0, kRunning = 1, kDone = 2, kFailed = 3 };

class OperationLog {
 public:
  explicit OperationLog(OperationHistory* history) : history_(*history) {}

  // Adds an operation and returns its number. Call on one thread at a time.
  uint64_t Add(const Description& description);
  // Records an operation's phase if the operation is still kept.
  void Update(uint64_t number, Phase phase);

 private:
  OperationHistory& history_;
};

// Each rank's last operations: one line per rank, each after a line break.
std::string ReportOperations(JobState* job);

}  // namespace keras_hvd
