// A futex that the kernel marks, and whose waiters it wakes, when the thread that holds
// it ends, in whatever way.
#pragma once

#include <linux/futex.h>

#include <atomic>
#include <cstdint>

namespace keras_hvd {

class HeldFutex {
 public:
  // Takes it for this thread, which uses none of the C library's robust mutexes as long
  // as it holds it, and holds one such futex at a time.
  explicit HeldFutex(std::atomic<uint32_t>* word);
  // Call from the same thread. Waiters see an owner of 0 and no death.
  ~HeldFutex();
  HeldFutex(const HeldFutex&) = delete;
  HeldFutex& operator=(const HeldFutex&) = delete;

 private:
  std::atomic<uint32_t>* const word_;
  // The list that the kernel looks up when the thread ends, and the one before.
  robust_list entry_;
  robust_list_head head_;
  robust_list_head* previous_ = nullptr;
};

}  // namespace keras_hvd
