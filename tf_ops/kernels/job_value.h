// A number of this process's job, as an op's value.
#ifndef KERAS_HVD_TF_OPS_KERNELS_JOB_VALUE_H_
#define KERAS_HVD_TF_OPS_KERNELS_JOB_VALUE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace keras_hvd {

// What KerasHvdJobValue returns.
struct JobValue {
  std::string quantity;
  int32_t process_set = 0;
};

absl::Status ReadJobValue(tensorflow::OpKernelConstruction* ctx, JobValue* value);
absl::StatusOr<int32_t> ValueOf(const JobValue& which);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_KERNELS_JOB_VALUE_H_
