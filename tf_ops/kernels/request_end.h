// The end of a started request, for use by an op other than the one that started it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>

#include "tf_ops/engine/c_api.h"

namespace keras_hvd {

// Known once the engine has ended the request. On a GPU, the collective is then
// enqueued and may still run. The destructor makes later work on the stream wait for
// the collective, so its buffers can be freed afterwards. It calls the engine, so it
// must not run in the request's `done`, nor before that: see DeleteOnceEnded.
class RequestEnd {
 public:
  RequestEnd() = default;
  ~RequestEnd() { Await(); }
  RequestEnd(const RequestEnd&) = delete;
  RequestEnd& operator=(const RequestEnd&) = delete;

  // For a request about to be submitted: makes the engine note here where its
  // collective ends on the GPU, if it is on one.
  void AddTo(khvd_request* request);

  // Takes the engine's result. Returns the waiting function, if any, which the caller
  // makes a thread call that may take long. Otherwise this may be gone by now.
  [[nodiscard]] std::function<void()> Set(int code, std::string message);

  // Calls `then` at once if the end is known, or else makes Set return it. Only one
  // function may wait.
  void WhenKnown(std::function<void()> then);
  // Does the engine's work until the end is known, or is not expected soon. Returns
  // whether it is known.
  bool Drive();
  // The same, but then blocks the thread until it is known. This does not last forever:
  // the engine ends requests that wait for a dead or stalled rank, with an error.
  void WaitUntilKnown();

  // Call it once known: makes later work on the stream wait for the collective.
  void Await();

  // Once known: the outcome of the request and of waiting for it.
  int code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  void* stream_ = nullptr;
  void* mark_ = nullptr;  // the engine's mark of the end on the GPU

  std::mutex mutex_;
  std::condition_variable known_;
  std::function<void()> then_;         // guarded by mutex_
  std::atomic<bool> is_known_{false};  // set under mutex_
  // Once known, these no longer change, except in Await.
  int code_ = KHVD_OK;
  std::string message_;
};

// Deletes the owner of the end() of a submitted request. If the request is under way,
// the engine uses it until then.
struct DeleteOnceEnded {
  template <typename Owner>
  void operator()(Owner* owner) const {
    owner->end().WhenKnown([owner] { delete owner; });
  }
};

}  // namespace keras_hvd
