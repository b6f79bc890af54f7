// See doorbell.h.
#include "tf_ops/transport/doorbell.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

#include "tf_ops/transport/faults.h"

namespace keras_hvd {

// The futexes are shared between processes, hence no FUTEX_PRIVATE_FLAG.
bool FutexWait(std::atomic<uint32_t>* word, uint32_t expected,
               Clock::time_point deadline) {
  timespec absolute;
  timespec* timeout = nullptr;
  if (deadline != Clock::time_point::max()) {
    const auto since = deadline.time_since_epoch();
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since);
    absolute.tv_sec = seconds.count();
    absolute.tv_nsec =
        std::chrono::duration_cast<std::chrono::nanoseconds>(since - seconds).count();
    timeout = &absolute;
  }
  // FUTEX_WAIT_BITSET takes an absolute time on the monotonic clock, which is what
  // std::chrono::steady_clock is on Linux.
  const long result = syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected, timeout,
                              nullptr, FUTEX_BITSET_MATCH_ANY);
  return !(result == -1 && errno == ETIMEDOUT);
}

void FutexWake(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Every ordering below is on `listening_` itself and sequentially consistent, rather
// than on a stand-alone fence: ThreadSanitizer understands only the former. Announce
// and Ring are both read-modify-writes, so one of them comes first in the word's order:
// if Announce, the ring finds what is listened to and wakes; if Ring, Announce reads
// from it and so sees all that was published before. Cancel is one as well, though its
// order matters to nobody: after a plain store, Announce would read that store instead,
// and know nothing of a ring before it.
void Doorbell::Ring(uint32_t about) {
  BeforeStore();
  const uint32_t listening = listening_.fetch_and(~about, std::memory_order_seq_cst);
  if ((listening & about) == 0) return;
  BeforeStore();
  FutexWake(&listening_);
}

void Doorbell::Wake() {
  listening_.exchange(0, std::memory_order_seq_cst);
  FutexWake(&listening_);
}

void Doorbell::Announce(uint32_t listening) {
  BeforeStore();
  listening_.exchange(listening, std::memory_order_seq_cst);
}

void Doorbell::Cancel() { listening_.exchange(0, std::memory_order_relaxed); }

bool Doorbell::Sleep(Clock::time_point deadline, uint32_t listening) {
  while (listening_.load(std::memory_order_acquire) == listening) {
    BeforeStore();
    if (FutexWait(&listening_, listening, deadline)) continue;
    return listening_.load(std::memory_order_acquire) != listening;
  }
  return true;
}

}  // namespace keras_hvd
