#include "tf_ops/kernels/request_end.h"

#include <utility>

namespace keras_hvd {

void RequestEnd::AddTo(khvd_request* request) {
  if (request->on_gpu == 0) return;
  stream_ = request->stream;
  request->end = &mark_;
}

std::function<void()> RequestEnd::Set(int code, std::string message) {
  std::lock_guard<std::mutex> lock(mutex_);
  code_ = code;
  message_ = std::move(message);
  is_known_.store(true);
  // Under the lock: the waiting thread may delete this as soon as it can.
  known_.notify_all();
  return std::move(then_);
}

void RequestEnd::WhenKnown(std::function<void()> then) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_known_) {
      then_ = std::move(then);
      return;
    }
  }
  then();
}

bool RequestEnd::Drive() {
  khvd_drive_until(reinterpret_cast<const uint8_t*>(&is_known_));
  return is_known_.load();
}

void RequestEnd::WaitUntilKnown() {
  Drive();
  // Set may still hold it.
  std::unique_lock<std::mutex> lock(mutex_);
  known_.wait(lock, [this] { return is_known_.load(); });
}

void RequestEnd::Await() {
  if (code_ != KHVD_OK || mark_ == nullptr) return;
  code_ = khvd_await_end(std::exchange(mark_, nullptr), stream_);
  if (code_ != KHVD_OK) message_ = khvd_last_error();
}

}  // namespace keras_hvd
