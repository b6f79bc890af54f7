#include "tf_ops/transport/doorbell.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

#include "tf_ops/transport/faults.h"

namespace keras_hvd {

// Processes share the futexes, so FUTEX_PRIVATE_FLAG is not set.
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
  // FUTEX_WAIT_BITSET takes an absolute time on the monotonic clock, which
  // std::chrono::steady_clock uses on Linux.
  const long result = syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected, timeout,
                              nullptr, FUTEX_BITSET_MATCH_ANY);
  return !(result == -1 && errno == ETIMEDOUT);
}

void FutexWake(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// All ordering below comes from sequentially consistent operations on `listening_`, not
// from a stand-alone fence, which ThreadSanitizer does not understand. Announce and
// Ring are both read-modify-writes, so one precedes the other in the word's
// modification order. If Announce is first, the ring sees what the sleeper listens to
// and wakes it. If Ring is first, Announce reads from it and so sees everything
// published before. The order of Cancel does not matter, but it is a read-modify-write
// too: Announce would read from a plain store and so miss an earlier ring.
void Doorbell::Ring(uint32_t about) {
  FaultPoint();
  const uint32_t listening = listening_.fetch_and(~about, std::memory_order_seq_cst);
  if ((listening & about) == 0) return;
  FaultPoint();
  FutexWake(&listening_);
}

void Doorbell::Wake() {
  listening_.exchange(0, std::memory_order_seq_cst);
  FutexWake(&listening_);
}

void Doorbell::Announce(uint32_t listening) {
  FaultPoint();
  listening_.exchange(listening, std::memory_order_seq_cst);
}

void Doorbell::Cancel() { listening_.exchange(0, std::memory_order_relaxed); }

bool Doorbell::Sleep(Clock::time_point deadline, uint32_t listening) {
  while (listening_.load(std::memory_order_acquire) == listening) {
    FaultPoint();
    if (FutexWait(&listening_, listening, deadline)) continue;
    return listening_.load(std::memory_order_acquire) != listening;
  }
  return true;
}

}  // namespace keras_hvd
