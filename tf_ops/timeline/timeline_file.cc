#include "tf_ops/timeline/timeline_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

namespace keras_hvd {

TimelineFile::~TimelineFile() { Close(); }

Status TimelineFile::Open(const std::string& path) {
  path_ = path;
  // Non-blocking, so a pipe needs no reader yet.
  const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK;
  descriptor_ = open(path.c_str(), flags, 0666);
  if (descriptor_ == -1) {
    return Status::InvalidArgument("the timeline '" + path +
                                   "' cannot be written: " + strerror(errno));
  }
  Append("[");
  Flush();
  return failure_;
}

void TimelineFile::Add(std::string_view event) {
  if (!failure_.ok()) return;
  const size_t bytes = event.size() + 2;  // with the separator
  if (used_ + bytes > kPageBytes) {
    memset(page_ + used_, ' ', kPageBytes - used_);
    used_ = kPageBytes;
    Flush();
  }
  Append(is_empty_ ? "\n" : ",\n");
  Append(event);
  is_empty_ = false;
}

void TimelineFile::Append(std::string_view text) {
  memcpy(page_ + used_, text.data(), text.size());
  used_ += text.size();
}

void TimelineFile::Flush() {
  const size_t begin = written_;
  while (failure_.ok() && written_ < used_) {
    const ssize_t count = write(descriptor_, page_ + written_, used_ - written_);
    if (count >= 0) {
      written_ += count;
    } else if (errno != EINTR) {
      failure_ = Status::Internal("the timeline '" + path_ +
                                  "' ends early: " + strerror(errno));
      // Part of an event may have been written.
      [[maybe_unused]] const int cut = ftruncate(descriptor_, whole_);
    }
  }
  whole_ += static_cast<int64_t>(used_ - begin);
  if (used_ == kPageBytes) used_ = written_ = 0;
}

void TimelineFile::Close() {
  if (descriptor_ == -1) return;
  if (used_ + 3 > kPageBytes) {
    memset(page_ + used_, ' ', kPageBytes - used_);
    used_ = kPageBytes;
    Flush();
  }
  Append("\n]\n");
  Flush();
  close(descriptor_);
  descriptor_ = -1;
}

}  // namespace keras_hvd
