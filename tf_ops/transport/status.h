// The outcome of an operation: a code of the C API and a human-readable text.
#pragma once

#include <string>
#include <utility>

namespace keras_hvd {

// The values equal those of khvd_code and leave the library unchanged.
enum class Code {
  kOk = 0,
  kInvalidArgument = 1,
  kNotInitialized = 2,
  kRankFailed = 3,
  kShutDown = 4,
  kForked = 5,
  kInternal = 6,
  kMismatch = 7,
};

struct [[nodiscard]] Status {
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }

  static Status Ok() { return {}; }
  static Status InvalidArgument(std::string text) {
    return {Code::kInvalidArgument, std::move(text)};
  }
  static Status RankFailed(std::string text) {
    return {Code::kRankFailed, std::move(text)};
  }
  static Status Internal(std::string text) {
    return {Code::kInternal, std::move(text)};
  }
};

// Returns from the function with the status of an expression, unless that is ok.
#define KHVD_RETURN_IF_ERROR(...)                    \
  do {                                               \
    ::keras_hvd::Status khvd_status = (__VA_ARGS__); \
    if (!khvd_status.ok()) return khvd_status;       \
  } while (false)

}  // namespace keras_hvd
