// This process' place in the job, as an op's value.
#ifndef KERAS_HVD_TF_OPS_KERNELS_PLACE_H_
#define KERAS_HVD_TF_OPS_KERNELS_PLACE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace keras_hvd {

// What KerasHvdPlace gives.
struct Place {
  std::string quantity;
  int32_t process_set = 0;
};

absl::Status ReadPlace(tensorflow::OpKernelConstruction* ctx, Place* place);
absl::StatusOr<int32_t> ValueOf(const Place& place);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_KERNELS_PLACE_H_
