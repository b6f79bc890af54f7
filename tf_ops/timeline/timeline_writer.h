// Makes trace events of the timeline's records: a row for each tensor, with the phases
// of its collectives.
//
// An event says when it began and how long it took, and is written when it has ended.
// As viewers require, events of one row are nested or follow each other: a request
// submitted while another of the same name is under way gets its own row. Work on the
// GPU has one row, because it has one stream there.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tf_ops/coordination/coordinator.h"
#include "tf_ops/timeline/timeline_file.h"
#include "tf_ops/timeline/timeline_record.h"
#include "tf_ops/transport/job_state.h"

namespace keras_hvd {

class TimelineWriter {
 public:
  // Times are written in microseconds from `start` (nanoseconds).
  TimelineWriter(TimelineFile* file, const JobState* job, int64_t start);

  void Add(const TimelineRecord& record);
  // How many requests, and phases of other requests, found no room since the last call.
  void AddSkipped(int64_t time, int64_t requests, int64_t phases);

 private:
  // Each row belongs to one of these, which viewers show as processes.
  static constexpr int kHost = 0;
  static constexpr int kGpu = 1;
  static constexpr int kOtherHosts = 2;

  struct Row {
    bool is_taken = false;
    int64_t taken_until = 0;
  };
  // A request from its decision to its end.
  struct Request {
    int row = 0;
    Kind kind = Kind::kAllreduce;
    int64_t begin = 0, end = 0;  // range of the data that travels: see PhaseRecorder
    int64_t size = 0;            // bytes of its tensors
  };
  struct Batch {
    int64_t decided = 0;
    int64_t began = 0;
    bool runs_here = true;
    int64_t bytes = 0;
    bool on_gpu = false;
    std::vector<Request> requests;
  };

  void AddArrivals(const TimelineRecord& record);
  void WriteNegotiation(const TimelineRecord& record);
  void WriteQueue(const TimelineRecord& record);
  void WritePhase(const TimelineRecord& record);
  void WriteCollective(const TimelineRecord& record);
  void WriteMissing(const TimelineRecord& record);
  void WriteGpuPhase(const TimelineRecord& record);
  void WriteBatchElsewhere(const TimelineRecord& record);
  // Not of rank 0's tensors.
  int NewOtherRow(int process, const std::string& process_name,
                  const std::string& name);
  void AddTensors(const TimelineRecord& record);
  void Release(const Batch& batch, int64_t time);
  int FindRow(const Description& description, int64_t from);
  int NewRow(const Description& description, size_t same_name);

  // The parts of a line.
  void BeginLine(std::string_view name, const char* type, int process = kHost);
  void BeginSpan(std::string_view name, int row, int64_t begin, int64_t end,
                 int process = kHost);
  void AddNumber(std::string_view field, int64_t number);
  void AddTime(std::string_view field, int64_t time);
  void BeginArguments(uint64_t batch);
  void EndLine(std::string_view end);

  TimelineFile& file_;
  const JobState& job_;
  const int64_t start_;
  std::map<uint64_t, Batch> batches_;              // decided and not ended
  std::vector<std::pair<int64_t, int>> arrivals_;  // times and ranks for a request
  std::vector<Row> rows_;
  std::unordered_map<TensorKey, std::vector<int>, TensorKeyHash> rows_of_;
  std::map<int, int> host_rows_;  // by the rank of the leader
  int gpu_row_ = -1;              // -1: nothing has run on a GPU
  std::string line_;
};

}  // namespace keras_hvd
