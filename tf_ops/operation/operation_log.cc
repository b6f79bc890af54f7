#include "tf_ops/operation/operation_log.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace keras_hvd {
namespace {

// Operations to show per rank: enough to see where ranks diverged.
constexpr uint64_t kShown = 3;

std::string OperationText(const OperationRecord& record) {
  static constexpr const char* kPhases[] = {"waiting for peers", "running", "done",
                                            "failed"};
  uint64_t words[OperationRecord::kNameWords + 1] = {};
  for (int i = 0; i < OperationRecord::kNameWords; ++i) {
    words[i] = record.name[i].load(std::memory_order_relaxed);
  }
  const uint64_t time = record.time_ns.load(std::memory_order_relaxed);
  char since[32];
  snprintf(since, sizeof(since), "%.1f s ago", (NowNanoseconds() - time) / 1e9);
  const Kind kind = static_cast<Kind>(record.kind.load());
  return Title(kind, reinterpret_cast<const char*>(words)) + " " +
         kPhases[record.phase.load() % 4] + " (" + since + ")";
}

}  // namespace

uint64_t OperationLog::Add(const Description& description) {
  const uint64_t number = history_.written.load(std::memory_order_relaxed);
  OperationRecord& record = history_.records[number % OperationHistory::kRecords];
  uint64_t words[OperationRecord::kNameWords] = {};
  memcpy(words, description.name.data(),
         std::min(sizeof(words) - 1, description.name.size()));
  for (int i = 0; i < OperationRecord::kNameWords; ++i) {
    record.name[i].store(words[i], std::memory_order_relaxed);
  }
  record.time_ns.store(NowNanoseconds(), std::memory_order_relaxed);
  record.kind.store(static_cast<uint32_t>(description.kind), std::memory_order_relaxed);
  record.phase.store(static_cast<uint32_t>(Phase::kSubmitted),
                     std::memory_order_relaxed);
  history_.written.store(number + 1, std::memory_order_release);
  return number;
}

void OperationLog::Update(uint64_t number, Phase phase) {
  if (history_.written.load(std::memory_order_relaxed) - number >
      OperationHistory::kRecords) {
    return;
  }
  history_.records[number % OperationHistory::kRecords].phase.store(
      static_cast<uint32_t>(phase), std::memory_order_relaxed);
}

std::string ReportOperations(JobState* job) {
  std::string text;
  for (int rank = 0; rank < job->size(); ++rank) {
    text += "\n  " + job->Describe(rank) + ": ";
    if (!job->HasHistory(rank)) {
      text += "its host did not answer";
      continue;
    }
    const OperationHistory& history = job->History(rank);
    const uint64_t written = history.written.load(std::memory_order_acquire);
    if (written == 0) text += "nothing submitted yet";
    for (uint64_t back = 1; back <= std::min(kShown, written); ++back) {
      if (back > 1) text += "; before: ";
      text +=
          OperationText(history.records[(written - back) % OperationHistory::kRecords]);
    }
  }
  return text;
}

}  // namespace keras_hvd
