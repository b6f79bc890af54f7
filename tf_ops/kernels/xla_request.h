// The request of a program compiled by XLA, as its custom calls' handlers receive it:
// the parts common to CPU and GPU.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "tf_ops/engine/c_api.h"
#include "tf_ops/kernels/xla_calls.h"
#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

namespace xla::ffi {
// TensorFlow's library defines it, but the declaring header needs LLVM's headers, which
// no package includes.
const XLA_FFI_Api* GetXlaFfiApi();
}  // namespace xla::ffi

namespace keras_hvd {
using DecodedRequest = CompiledRequest<xla::ffi::Span<const int64_t>>;
}  // namespace keras_hvd

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::keras_hvd::DecodedRequest, ::xla::ffi::StructMember<int32_t>("kind"),
    ::xla::ffi::StructMember<std::string_view>("name"),
    ::xla::ffi::StructMember<int64_t>("submitter"),
    ::xla::ffi::StructMember<int32_t>("process_set"),
    ::xla::ffi::StructMember<int32_t>("reduce_op"),
    ::xla::ffi::StructMember<int32_t>("root"),
    ::xla::ffi::StructMember<double>("prescale"),
    ::xla::ffi::StructMember<double>("postscale"),
    ::xla::ffi::StructMember<std::string_view>("labels"),
    ::xla::ffi::StructMember<::xla::ffi::Span<const int64_t>>("rows"),
    ::xla::ffi::StructMember<int32_t>("slot"),
    ::xla::ffi::StructMember<std::string_view>("quantity"),
    ::xla::ffi::StructMember<int32_t>("value"),
    ::xla::ffi::StructMember<std::string_view>("place"));

namespace keras_hvd {

using TokenBuffer = xla::ffi::BufferR1<xla::ffi::U64>;

// Converts a code of the engine to XLA's.
xla::ffi::ErrorCode ErrorCode(int code);

// The outcome of a check.
absl::Status Check(const DecodedRequest& check);

// Results with sizes that other ranks decide, but shapes that the program has fixed.
class FixedResults {
 public:
  explicit FixedResults(std::string_view name) : name_(name) {}

  // Adds a tensor of which this rank gives `given_rows`; its result of `rows` goes to
  // `memory`.
  void Add(int64_t given_rows, int64_t rows, void* memory);
  // For an alltoall: where to note how many rows came from each rank.
  void set_received_splits(int64_t* splits) { received_splits_ = splits; }

  // Implements khvd_allocate; null if the rows are not those of the program.
  void* Allocate(int32_t tensor, const int64_t* first_dims, int32_t count);
  // Why Allocate returned null, or "".
  const std::string& rows_differ() const { return rows_differ_; }

 private:
  struct Result {
    int64_t given_rows;
    int64_t rows;
    void* memory;
  };

  std::string WrongRows(const Result& result, const int64_t* first_dims,
                        int32_t count) const;

  const std::string name_;
  std::vector<Result> results_;
  int64_t* received_splits_ = nullptr;
  std::string rows_differ_;
};

// A request for the engine, and the data it points to.
class ProgramRequest {
 public:
  // Notes in `results` those with sizes that other ranks decide.
  ProgramRequest(const DecodedRequest& compiled, xla::ffi::RemainingArgs tensors,
                 xla::ffi::RemainingRets buffers, FixedResults* results);
  ProgramRequest(const ProgramRequest&) = delete;
  ProgramRequest& operator=(const ProgramRequest&) = delete;

  khvd_request& request() { return request_; }

 private:
  void SetRows(const DecodedRequest& compiled, FixedResults* results);

  const std::string name_;
  const std::string labels_;
  absl::InlinedVector<khvd_tensor, 4> tensors_;
  std::vector<std::vector<int64_t>> shapes_;
  khvd_request request_ = {};
};

}  // namespace keras_hvd
