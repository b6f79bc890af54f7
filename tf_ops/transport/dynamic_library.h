// A shared library that is opened at run time and stays open: such libraries may have
// threads of their own.
#pragma once

#include <string>

#include "tf_ops/transport/status.h"

namespace keras_hvd {

class DynamicLibrary {
 public:
  // `name`: a path, or a name to look for on the library path. `missing`: the error if
  // there is no such file; other errors describe what is wrong with it.
  static Status Open(const std::string& name, const std::string& missing,
                     DynamicLibrary* library);
  // The same where other libraries of the process may have functions of the same names,
  // `symbol` among them: this one calls its own, unless the process has another malloc
  // than the C library's.
  static Status OpenBesideOthers(const std::string& name, const std::string& missing,
                                 const char* symbol, DynamicLibrary* library);

  // Sets the pointer to a function.
  template <typename Function>
  Status Find(const char* symbol, Function** function) const {
    void* address = nullptr;
    Status status = FindAddress(symbol, &address);
    *function = reinterpret_cast<Function*>(address);
    return status;
  }

  // The file that was found.
  const std::string& path() const { return path_; }

 private:
  static Status OpenWith(const std::string& name, int flags, const std::string& missing,
                         DynamicLibrary* library);
  Status FindAddress(const char* symbol, void** address) const;

  void* handle_ = nullptr;
  std::string path_;
};

}  // namespace keras_hvd
