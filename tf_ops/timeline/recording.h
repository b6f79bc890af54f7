// Adds up a timeline's records: for each step, rank 0's time and who waited for whom;
// for each tensor, its time.
//
// A step ends where a request is first submitted whose name it already has. Requests of
// callbacks, which follow a step's own, belong to it. Overlapping events of a kind
// count once, exact to the nanosecond. Of events that end more than half a second after
// their step, the part before the next step is left out.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tf_ops/coordination/coordinator.h"
#include "tf_ops/timeline/recording_file.h"
#include "tf_ops/timeline/timeline_record.h"
#include "tf_ops/transport/job_state.h"

namespace keras_hvd {

// The time that is covered by spans, which come in about the order of time.
class CoveredTime {
 public:
  void Add(int64_t begin, int64_t end);
  // To be called before Take, after Add.
  void Sort();
  // The time covered from the last Take's `to` until this one.
  int64_t Take(int64_t to);
  size_t spans() const { return spans_.size(); }

 private:
  std::vector<std::pair<int64_t, int64_t>> spans_;
  size_t sorted_ = 0;  // of these, how many do not overlap, in their order
  size_t next_ = 0;
  int64_t taken_ = INT64_MIN;
};

class Recording {
 public:
  Recording(RecordingFile* file, const JobState* job, int64_t start);

  void Add(const TimelineRecord& record);
  // Adds the steps that are over to the file. `left_out`: the number of all requests
  // not recorded so far. `has_all`: there are no more records up to now.
  void Flush(int64_t now, bool has_all, int64_t left_out);
  // Adds the rest.
  void Close();

 private:
  struct Request {
    RecordingFile::Tensor* tensor;
    int64_t bytes, first, last, own;  // own: when rank 0 submitted it
  };
  struct Batch {
    int64_t decided = 0;
    int64_t began = 0;
    bool runs_here = true;
    std::vector<Request> requests;
  };
  // A step that has begun.
  struct Step {
    int64_t begin;
    int64_t last_own = 0;  // rank 0's last submission, but for those of callbacks
  };
  struct Stalled {
    RecordingFile::Event* event;
    int64_t since;
    std::string text;
  };

  void AddArrivals(const TimelineRecord& record);
  void AddRequest(const TimelineRecord& record);
  void AddWaits(const std::vector<std::pair<int64_t, int>>& arrivals);
  void NoteStep(const TensorKey& key, int64_t first);
  void End(const TimelineRecord& record);
  void AddMissing(const TimelineRecord& record);
  void EndStall(const TensorKey& key, int64_t first, int64_t last);
  RecordingFile::Tensor* Find(const TensorKey& key);
  void AddSteps(int64_t until);
  void Sort();
  void AddStep(const Step& step, int64_t end);
  double Seconds(int64_t time) const {
    return 1e-9 * static_cast<double>(time - start_);
  }

  RecordingFile& file_;
  const JobState& job_;
  const int64_t start_;
  int64_t newest_ = 0;  // the time of the newest record
  std::map<uint64_t, Batch> batches_;
  std::vector<std::pair<int64_t, int>> arrivals_;
  std::unordered_map<TensorKey, RecordingFile::Tensor*, TensorKeyHash> tensors_;
  std::unordered_map<TensorKey, Stalled, TensorKeyHash> stalls_;

  std::deque<Step> steps_;                              // begun, and not in the file
  std::unordered_set<TensorKey, TensorKeyHash> names_;  // of the last of them
  CoveredTime moving_, busy_;  // busy: moving, or a request of rank 0 waits
  std::vector<CoveredTime> waits_, waited_for_;
  std::deque<std::pair<int64_t, int64_t>> bytes_;  // when, and how many
};

}  // namespace keras_hvd
