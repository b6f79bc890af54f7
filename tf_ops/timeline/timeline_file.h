// A file of trace events that is valid at every moment: JSON in the array format of
// Chrome's tracing, which needs no closing bracket.
//
// A process can be killed in the middle of a write, which the kernel then cuts at the
// end of a page. Hence no write here crosses the end of a page of the file: an event
// that no longer fits begins on the next page, after spaces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "tf_ops/transport/status.h"

namespace keras_hvd {

class TimelineFile {
 public:
  static constexpr size_t kPageBytes = 4096;
  static constexpr size_t kLongestEvent = kPageBytes - 2;

  TimelineFile() = default;
  ~TimelineFile();
  TimelineFile(const TimelineFile&) = delete;
  TimelineFile& operator=(const TimelineFile&) = delete;

  // Begins an empty file, replacing any old one.
  Status Open(const std::string& path);
  // Adds an event: a JSON object on one line, of at most kLongestEvent bytes.
  void Add(std::string_view event);
  // Passes the added events to the system, where they outlive this process.
  void Flush();
  // Ends the array and closes the file.
  void Close();

  // Why the file ends early, or OK. After a failure nothing more is written.
  const Status& failure() const { return failure_; }

 private:
  void Append(std::string_view text);

  std::string path_;
  int descriptor_ = -1;
  bool is_empty_ = true;
  int64_t whole_ = 0;   // bytes of whole events in the file
  size_t used_ = 0;     // bytes of page_
  size_t written_ = 0;  // bytes of those in the file
  alignas(kPageBytes) char page_[kPageBytes];
  Status failure_;
};

}  // namespace keras_hvd
