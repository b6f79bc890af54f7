// How a request ends that another op than its own asks about: one that has started.
#ifndef KERAS_HVD_TF_OPS_KERNELS_REQUEST_END_H_
#define KERAS_HVD_TF_OPS_KERNELS_REQUEST_END_H_

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>

#include "tf_ops/engine/c_api.h"

namespace keras_hvd {

// Known once the engine has ended the request; on a GPU the collective is enqueued
// then, and runs. Whoever destroys it has whatever the stream runs next wait for the
// collective, so that its buffers can be freed afterwards.
class RequestEnd {
 public:
  RequestEnd() = default;
  ~RequestEnd() { Await(); }
  RequestEnd(const RequestEnd&) = delete;
  RequestEnd& operator=(const RequestEnd&) = delete;

  // Has a request that is about to be submitted note here where its collective ends on
  // the GPU, if it is on one.
  void AddTo(khvd_request* request);

  // As the engine says it; what waits is told in this thread.
  void Set(int code, std::string message);

  // Calls `then` once it is known: in Set, or at once. One may wait.
  void WhenKnown(std::function<void()> then);
  // Holds the thread until then. It has an end: the engine ends what a dead or stalled
  // rank would be waited for in vain, with an error.
  void WaitUntilKnown();

  // Once known: has what the stream runs next wait for the collective.
  void Await();

  // Once known; what the request, and waiting for it, came to.
  int code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  void* stream_ = nullptr;
  void* mark_ = nullptr;  // the engine's, of the end on the GPU

  std::mutex mutex_;
  std::condition_variable known_;
  std::function<void()> then_;  // guarded by mutex_
  bool is_known_ = false;       // guarded by mutex_
  // Do not change any more once it is known, but by Await.
  int code_ = KHVD_OK;
  std::string message_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_KERNELS_REQUEST_END_H_
