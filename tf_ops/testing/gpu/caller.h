// For tests of functions for callers with tensors on a GPU.
#pragma once

#include "tf_ops/testing/gpu/stand_in.h"

namespace keras_hvd::stand_in {

// A stream, and a float on it, of a caller that uses the driver by itself.
class Caller {
 public:
  Caller() {
    libraries_.cuda().init(0);
    libraries_.cuda().retain_primary_context(&context_, 0);
    libraries_.cuda().push_context(context_);
    libraries_.cuda().create_stream(&stream_, cuda::kStreamNonBlocking, 0);
    libraries_.cuda().allocate(&memory_, sizeof(float));
  }
  ~Caller() {
    libraries_.cuda().free(memory_);
    libraries_.cuda().destroy_stream(stream_);
    libraries_.cuda().release_primary_context(0);
  }

  const StandIn& libraries() const { return libraries_; }
  void* stream() const { return stream_; }
  float* memory() const { return reinterpret_cast<float*>(memory_); }

  void Write(float value) const {
    libraries_->Enqueue(stream_, [at = memory(), value] { *at = value; });
  }
  float Read() const {
    float value = -1;
    libraries_->Enqueue(stream_, [at = memory(), &value] { value = *at; });
    return libraries_->Synchronize(stream_).empty() ? value : -2;
  }

 private:
  const StandIn libraries_;
  cuda::Context context_ = nullptr;
  cuda::Stream stream_ = nullptr;
  cuda::Pointer memory_ = 0;
};

}  // namespace keras_hvd::stand_in
