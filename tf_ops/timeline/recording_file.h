// The file of a recording: a job's history in a fixed number of stretches of whole
// steps. When all are taken, neighbours are merged, and each has twice as many steps.
// So a file of a fixed size has the whole of a job, however long that is.
//
// The file is mapped: its content outlives this process, however that ends. The
// stretches are merged into a second table, which then takes the place of the first, so
// that a reader, or a kill, never meets half a merge. keras_hvd/report/recording.py
// reads it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tf_ops/transport/status.h"

namespace keras_hvd {

class RecordingFile {
 public:
  static constexpr int kStretches = 2048;
  // Of more ranks, neighbours share a column.
  static constexpr int kMostColumns = 256;
  static constexpr int kTensors = 1024;
  static constexpr int kEvents = 256;

  // All times are in nanoseconds from `started`.
  struct Header {
    std::atomic<int64_t> magic;  // set once all constant fields are there
    int32_t size, columns, ranks_in_column, stretches, tensor_room, event_room;
    int64_t started;  // of NowNanoseconds
    double begin;     // the same in seconds since the epoch
    // The fields from here on change.
    std::atomic<int64_t> recorded;  // how long
    std::atomic<int64_t> left_out;  // requests
    std::atomic<int64_t> tensors, events, events_left_out;
    std::atomic<int64_t> active;  // which of these is in use
    struct {
      std::atomic<int64_t> stretches, steps;  // in use, and of each but the last
    } tables[2];
  };
  // A stretch's numbers before its columns: the waits of all, and the waits for them.
  struct Stretch {
    double begin, end, steps, bytes, moving, waiting, exposed_moving, exposed_waiting;
  };
  struct Tensor {
    static constexpr size_t kLongestName = 128;
    char name[kLongestName];  // not ended if it fills this
    double times, bytes, negotiating, queued, running;
  };
  struct Event {
    static constexpr size_t kLongestText = 248;
    double time;
    char text[kLongestText];
  };
  // A step, to be added to the last stretch.
  struct Step {
    Stretch sums{};
    std::vector<double> waits, waited_for;  // by rank
  };

  RecordingFile() = default;
  ~RecordingFile();
  RecordingFile(const RecordingFile&) = delete;
  RecordingFile& operator=(const RecordingFile&) = delete;

  // Makes the file, in place of any old one.
  Status Open(const std::string& path, int size, int64_t started);

  void AddStep(const Step& step);
  // The entry of a new name; the last one, for all others, if there is no room.
  Tensor* AddTensor(std::string_view name);
  // Null if there is no room.
  Event* AddEvent();
  Header& header() { return *reinterpret_cast<Header*>(memory_); }

  static void Write(std::string_view text, char* to, size_t room);

 private:
  double* Row(int64_t table, int64_t stretch) const;
  void Merge();

  char* memory_ = nullptr;
  size_t bytes_ = 0, numbers_ = 0;  // of the file, and of a stretch
  char *tensors_ = nullptr, *events_ = nullptr;
  double *totals_ = nullptr, *tables_ = nullptr;
};

}  // namespace keras_hvd
