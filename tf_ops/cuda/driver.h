// The CUDA driver, opened at run time.
#pragma once

#include <memory>
#include <string>

#include "tf_ops/cuda/abi.h"
#include "tf_ops/transport/status.h"

namespace keras_hvd::cuda {

class Driver {
 public:
  // `path`: the library, or "" for the system's libcuda.so.1. The status says why it
  // cannot be used: it is missing, lacks a function, or finds no device.
  static Status Open(const std::string& path, std::shared_ptr<const Driver>* driver);
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  const Functions& functions() const { return functions_; }
  const Functions* operator->() const { return &functions_; }

  // OK, or the driver's error for its function `name`.
  Status Check(Result result, const char* name) const;

  // For people: "CUDA 12.4 (libcuda.so.1), 2 devices".
  const std::string& text() const { return text_; }

 private:
  Driver() = default;
  Status Start(const std::string& path);

  Functions functions_;
  std::string text_;
};

}  // namespace keras_hvd::cuda
