// Ends calls of NCCL that would never return.
//
// NCCL's calls block: a nonblocking communicator would start a thread for every group.
// Most return within microseconds, but one may wait for a member that has died: for its
// connection, or for room in a queue that the GPU no longer empties. The thread inside
// then cannot hear of it. So when a call takes long, the watch's thread waits in the
// caller's way, with the caller's state, until the call returns or there is nothing to
// wait for any more. Then it aborts, which makes NCCL return. If NCCL does not, the
// watch says so.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace keras_hvd::nccl {

// Called repeatedly during a wait, with the number of polls so far, to let others run.
// Returning false ends the wait.
using KeepWaiting = std::function<bool(int64_t polls)>;
using AbortCall = std::function<void()>;
// Must call `abort`, after all that has to come before.
using GiveUp = std::function<void(const AbortCall& abort)>;
// Called once for a call that its abort has not ended: its thread is lost.
using SayStuck = std::function<void()>;

class CallWatch {
 public:
  // `patience`: how long a call may take before the watch takes part. Its thread wakes
  // this often while there are calls. `abort_patience`: how long one may take to end
  // after its abort.
  CallWatch(KeepWaiting keep_waiting, GiveUp give_up, SayStuck say_stuck,
            std::chrono::microseconds patience = std::chrono::milliseconds(100),
            std::chrono::microseconds abort_patience = std::chrono::seconds(10))
      : keep_waiting_(std::move(keep_waiting)),
        give_up_(std::move(give_up)),
        say_stuck_(std::move(say_stuck)),
        patience_(patience),
        abort_patience_(abort_patience) {}
  ~CallWatch();
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;

  // For waits of the caller itself.
  bool KeepsWaiting(int64_t polls) const { return keep_waiting_(polls); }

  // Makes a call, which `abort` ends. Returns false if it was ended so. Its effect is
  // then unknown. One thread at a time, and not from within a call. Raises
  // std::system_error without room for the watch's thread, and the exceptions of
  // `call`.
  template <typename Call>
  bool Run(const AbortCall& abort, const Call& call) {
    Enter(abort);
    try {
      call();
    } catch (...) {
      Leave();
      throw;
    }
    return Leave();
  }

 private:
  void Enter(const AbortCall& abort);
  bool Leave();
  void Loop();
  void Rest(std::unique_lock<std::mutex>* lock, uint64_t seen);
  void TakeOver(uint64_t call);
  void LookWhetherStuck();

  const KeepWaiting keep_waiting_;
  const GiveUp give_up_;
  const SayStuck say_stuck_;
  const std::chrono::microseconds patience_;
  const std::chrono::microseconds abort_patience_;

  // Odd within a call. A call that returns soon changes nothing else.
  std::atomic<uint64_t> calls_{0};
  std::atomic<bool> resting_{false};      // the thread sleeps until it is notified
  std::atomic<bool> taking_over_{false};  // Leave must wait for it
  const AbortCall* abort_ = nullptr;      // the current call's
  bool given_up_ = false;                 // the current call; guarded by mutex_
  // The time of the last call that was given up, until it is said to be stuck. Only the
  // thread uses it.
  std::optional<std::chrono::steady_clock::time_point> given_up_at_;
  std::mutex mutex_;  // held while the thread acts for a caller
  std::condition_variable changed_;
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace keras_hvd::nccl
