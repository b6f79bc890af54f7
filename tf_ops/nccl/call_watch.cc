#include "tf_ops/nccl/call_watch.h"

#include "tf_ops/transport/threads.h"

namespace keras_hvd::nccl {
CallWatch::~CallWatch() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void CallWatch::Enter(const AbortCall& abort) {
  if (!thread_.joinable()) {
    thread_ = StartThread("keras_hvd_nccl", [this] { Loop(); });
  }
  abort_ = &abort;
  calls_.fetch_add(1);
  if (!resting_.load()) return;
  // With the lock, the thread is either before its look at the calls or asleep.
  {
    std::lock_guard<std::mutex> lock(mutex_);
  }
  changed_.notify_one();
}

bool CallWatch::Leave() {
  calls_.fetch_add(1);
  if (!taking_over_.load()) return true;
  std::lock_guard<std::mutex> lock(mutex_);
  taking_over_.store(false);
  return !std::exchange(given_up_, false);
}

void CallWatch::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    const uint64_t seen = calls_.load();
    changed_.wait_for(lock, patience_, [this] { return stopping_; });
    if (stopping_ || calls_.load() != seen) continue;
    if (seen % 2 == 1) {
      TakeOver(seen);
    } else {
      Rest(&lock, seen);
    }
  }
}

// There are no calls: an idle process uses no time.
void CallWatch::Rest(std::unique_lock<std::mutex>* lock, uint64_t seen) {
  resting_.store(true);
  changed_.wait(*lock, [&] { return stopping_ || calls_.load() != seen; });
  resting_.store(false);
}

// Acts in the caller's place. Leave waits for the end of this if it came too late to be
// seen here.
void CallWatch::TakeOver(uint64_t call) {
  taking_over_.store(true);
  if (given_up_ && calls_.load() == call) LookWhetherStuck();
  for (int64_t polls = 0; !given_up_ && calls_.load() == call; ++polls) {
    if (keep_waiting_(polls)) continue;
    given_up_ = true;
    give_up_(*abort_);
    given_up_at_ = std::chrono::steady_clock::now();
  }
}

void CallWatch::LookWhetherStuck() {
  if (!given_up_at_.has_value()) return;
  if (std::chrono::steady_clock::now() - *given_up_at_ < abort_patience_) return;
  given_up_at_.reset();
  say_stuck_();
}

}  // namespace keras_hvd::nccl
