#include "tf_ops/kernels/completion.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace keras_hvd {
namespace {

class CompletionThread {
 public:
  CompletionThread() {
    std::thread thread(&CompletionThread::Loop, this);
    pthread_setname_np(thread.native_handle(), "keras_hvd_done");
    thread.detach();
  }

  void Add(std::function<void()> continuation) {
    bool sleeping;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      sleeping = pending_.empty();
      pending_.push_back(std::move(continuation));
    }
    if (sleeping) added_.notify_one();
  }

 private:
  [[noreturn]] void Loop() {
    std::vector<std::function<void()>> batch;
    while (true) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        added_.wait(lock, [this] { return !pending_.empty(); });
        batch.swap(pending_);
      }
      for (std::function<void()>& continuation : batch) {
        continuation();
        continuation = nullptr;  // frees its captures before the next one runs
      }
      batch.clear();
    }
  }

  std::mutex mutex_;
  std::condition_variable added_;
  std::vector<std::function<void()>> pending_;  // guarded by mutex_
};

CompletionThread& Thread() {
  // Never destroyed: a collective may end while the process exits.
  static CompletionThread* const thread = new CompletionThread;
  return *thread;
}

}  // namespace

absl::Status StartCompletionThread() {
  try {
    Thread();
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "there is no room for the thread that ends collectives: ", error.what(),
        ". See ulimit -u, ulimit -v, and pids.max of the "
        "control group (docker run --pids-limit; Kubernetes: podPidsLimit)"));
  }
  return absl::OkStatus();
}

void CompleteLater(std::function<void()> continuation) {
  Thread().Add(std::move(continuation));
}

}  // namespace keras_hvd
