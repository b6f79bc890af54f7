// The attributes of the collective ops, as the CPU and XLA kernels read them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/engine/c_api.h"

namespace keras_hvd {

// The way to combine elements.
struct Reduction {
  int32_t op = KHVD_AVERAGE;  // khvd_reduce_op
  double prescale = 1;
  double postscale = 1;

  // Sets this in a request of the engine or of a compiled program.
  template <typename Request>
  void AddTo(Request* request) const {
    request->reduce_op = op;
    request->prescale = prescale;
    request->postscale = postscale;
  }
};

// Consecutive tensors that travel together.
struct Bucket {
  int64_t size = 0;  // number of tensors
  std::string name;
  std::string labels;  // see khvd_request
};

// An error if a tensor has no first dimension. `does`: the collective's action on
// tensors.
absl::Status RequireRows(int dimensions, std::string_view does);
absl::Status ReadTensorName(tensorflow::OpKernelConstruction* ctx, std::string* name);
absl::Status ReadProcessSet(tensorflow::OpKernelConstruction* ctx, int32_t* set);
absl::Status ReadReduction(tensorflow::OpKernelConstruction* ctx, Reduction* reduction);
// Reads the buckets of KerasHvdGradients, which together cover all of its tensors.
absl::Status ReadBuckets(tensorflow::OpKernelConstruction* ctx,
                         std::vector<Bucket>* buckets);

}  // namespace keras_hvd
