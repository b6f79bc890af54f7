// For tests of what a process keeps open.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#include <set>

namespace keras_hvd {

// The numbers of this process' open descriptors.
inline std::set<int32_t> OpenDescriptors() {
  std::set<int32_t> open;
  DIR* const entries = opendir("/proc/self/fd");
  EXPECT_NE(entries, nullptr);
  while (const dirent* entry = readdir(entries)) {
    if (entry->d_name[0] != '.') open.insert(atoi(entry->d_name));
  }
  open.erase(dirfd(entries));
  closedir(entries);
  return open;
}

// A descriptor that cancels a start, once asked to.
class CancelPipe {
 public:
  CancelPipe() { EXPECT_EQ(pipe2(ends_, O_CLOEXEC), 0); }
  ~CancelPipe() {
    close(ends_[0]);
    HangUp();
  }
  CancelPipe(const CancelPipe&) = delete;
  CancelPipe& operator=(const CancelPipe&) = delete;

  const int32_t& fd() const { return ends_[0]; }
  void Cancel() const { EXPECT_EQ(write(ends_[1], "c", 1), 1); }
  // Cancels, too.
  void HangUp() {
    if (ends_[1] >= 0) close(ends_[1]);
    ends_[1] = -1;
  }

 private:
  int32_t ends_[2];
};

}  // namespace keras_hvd
