// NCCL, opened at run time.
#pragma once

#include <memory>
#include <string>

#include "tf_ops/nccl/abi.h"
#include "tf_ops/transport/status.h"

namespace keras_hvd::nccl {

// For people: "2.23.4" for 22304.
std::string VersionText(int version);

class Library {
 public:
  // `path`: the library, or "" for libnccl.so.2 on the library path. The status says
  // why it cannot be used: it is missing, too old, or lacks a function.
  static Status Open(const std::string& path, std::shared_ptr<const Library>* library);
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const Functions* operator->() const { return &functions_; }
  int version() const { return version_; }  // 22304 for 2.23.4

  // OK, also while in progress; or NCCL's error for its function `name`. `comm` is null
  // if there is none yet.
  Status Check(Result result, const char* name, Comm comm) const;

  // For people: "NCCL 2.23.4 (/usr/lib/libnccl.so.2)".
  const std::string& text() const { return text_; }

 private:
  Library() = default;

  Functions functions_;
  int version_ = 0;
  std::string text_;
};

}  // namespace keras_hvd::nccl
