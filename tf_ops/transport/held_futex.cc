#include "tf_ops/transport/held_futex.h"

#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tf_ops/transport/doorbell.h"
#include "tf_ops/transport/faults.h"

namespace keras_hvd {

HeldFutex::HeldFutex(std::atomic<uint32_t>* word) : word_(word) {
  static_assert(sizeof(*word) == sizeof(uint32_t));
  size_t size;
  syscall(SYS_get_robust_list, 0, &previous_, &size);
  head_.list.next = &entry_;
  entry_.next = &head_.list;
  head_.futex_offset = reinterpret_cast<char*>(word) - reinterpret_cast<char*>(&entry_);
  head_.list_op_pending = nullptr;
  syscall(SYS_set_robust_list, &head_, sizeof(head_));
  // With FUTEX_WAITERS the kernel wakes on death whether or not anybody waits yet.
  FaultPoint();
  word->store(static_cast<uint32_t>(syscall(SYS_gettid)) | FUTEX_WAITERS,
              std::memory_order_release);
}

HeldFutex::~HeldFutex() {
  FaultPoint();
  word_->store(0, std::memory_order_release);
  FaultPoint();
  FutexWake(word_);
  // The kernel would follow this list through memory that is another's by then, and
  // write to each word there that equals the thread's number.
  syscall(SYS_set_robust_list, previous_, sizeof(head_));
}

}  // namespace keras_hvd
