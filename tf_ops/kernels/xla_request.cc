#include "tf_ops/kernels/xla_request.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "tf_ops/kernels/element_types.h"
#include "tf_ops/kernels/job_value.h"
#include "tf_ops/kernels/submit.h"

namespace keras_hvd {
namespace {

namespace ffi = xla::ffi;

khvd_dtype EngineType(ffi::DataType dtype) {
  switch (dtype) {
#define KERAS_HVD_TYPE(ENGINE, TENSORFLOW, XLA) \
  case ffi::XLA: return KHVD_##ENGINE;
    KERAS_HVD_ELEMENT_TYPES(KERAS_HVD_TYPE)
#undef KERAS_HVD_TYPE
    default:  // refused by the engine
      return static_cast<khvd_dtype>(-1);
  }
}

}  // namespace

// XLA's codes are those of absl::Status.
ffi::ErrorCode ErrorCode(int code) {
  return static_cast<ffi::ErrorCode>(EngineStatus(code, "").code());
}

absl::Status Check(const DecodedRequest& check) {
  return RequireSame(check.name, {{std::string(check.quantity), check.process_set},
                                  check.value,
                                  std::string(check.place)});
}

void FixedResults::Add(int64_t given_rows, int64_t rows, void* memory) {
  results_.push_back({given_rows, rows, memory});
}

void* FixedResults::Allocate(int32_t tensor, const int64_t* first_dims, int32_t count) {
  const Result& result = results_[tensor];
  std::string wrong = WrongRows(result, first_dims, count);
  if (!wrong.empty()) {
    rows_differ_ = std::move(wrong);
    return nullptr;
  }
  if (received_splits_ != nullptr) {
    std::copy(first_dims, first_dims + count, received_splits_);
  }
  // An empty result has no memory, but null would mean that allocation failed.
  static char empty;
  return result.memory == nullptr ? &empty : result.memory;
}

// Why the rows received differ from those that the program was compiled for, or "".
std::string FixedResults::WrongRows(const Result& result, const int64_t* first_dims,
                                    int32_t count) const {
  const absl::Span<const int64_t> given(first_dims, count);
  int64_t sum = 0;
  bool differ = false;
  for (const int64_t rows : given) {
    sum += rows;
    differ |= rows != result.given_rows;
  }
  const std::string all = absl::StrJoin(given, ", ");
  if (received_splits_ != nullptr) {
    if (sum == result.rows) return "";
    return absl::StrCat(
        "alltoall '", name_, "': the ranks gave this one ", all,
        " rows, but a program compiled by XLA has fixed shapes: here it must get as "
        "many as it gives, ",
        result.rows,
        " in all. Give other splits, or exchange outside of jit_compile=True");
  }
  if (!differ && sum == result.rows) return "";
  return absl::StrCat(
      "allgather '", name_, "': the ranks gave ", all,
      " rows, but a program compiled by XLA has fixed shapes: here each must give ",
      result.given_rows, ", and there must be ", result.rows,
      " in all. Give as many rows on every rank, or gather outside of "
      "jit_compile=True");
}

ProgramRequest::ProgramRequest(const DecodedRequest& compiled,
                               ffi::RemainingArgs tensors, ffi::RemainingRets buffers,
                               FixedResults* results)
    : name_(compiled.name), labels_(compiled.labels) {
  // An alltoall's second tensor holds its splits.
  const size_t count = compiled.kind == KHVD_ALLTOALL ? 1 : tensors.size();
  for (size_t i = 0; i < count; ++i) {
    const ffi::AnyBuffer input = *tensors.get<ffi::AnyBuffer>(i);
    ffi::Result<ffi::AnyBuffer> result = *buffers.get<ffi::AnyBuffer>(i);
    khvd_tensor tensor = {};
    tensor.dtype = EngineType(input.element_type());
    tensor.rank = static_cast<int32_t>(result->dimensions().size());
    tensor.shape = result->dimensions().begin();
    tensor.input = input.untyped_data();
    tensor.output = result->untyped_data();
    tensors_.push_back(tensor);
  }
  SetRows(compiled, results);
  request_.struct_size = sizeof(request_);
  request_.kind = compiled.kind;
  request_.name = name_.c_str();
  request_.submitter = static_cast<uint64_t>(compiled.submitter);
  request_.process_set = compiled.process_set;
  request_.reduce_op = compiled.reduce_op;
  request_.root = compiled.root;
  request_.prescale = compiled.prescale;
  request_.postscale = compiled.postscale;
  request_.count = static_cast<int32_t>(tensors_.size());
  request_.tensors = tensors_.data();
  request_.labels = labels_.c_str();
}

// Sets the tensors' first dimensions to those of this rank.
void ProgramRequest::SetRows(const DecodedRequest& compiled, FixedResults* results) {
#define KHVD_KIND(UPPER, Camel, lower, tensors, group, reduces, rows, own, parts) own,
  static constexpr bool kHaveOwnRows[] = {KHVD_KINDS(KHVD_KIND)};
#undef KHVD_KIND
  for (size_t i = 0; i < compiled.rows.size(); ++i) {
    khvd_tensor& tensor = tensors_[i];
    const int64_t rows = compiled.rows[i];
    if (kHaveOwnRows[compiled.kind]) {
      results->Add(rows, tensor.shape[0], std::exchange(tensor.output, nullptr));
    }
    shapes_.emplace_back(tensor.shape, tensor.shape + tensor.rank).front() = rows;
    tensor.shape = shapes_.back().data();
  }
}

}  // namespace keras_hvd
