// KerasHvdJobValue: this process's rank and other numbers of the job, at the time the
// op runs.
#include "tf_ops/kernels/job_value.h"

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tf_ops/engine/c_api.h"
#include "tf_ops/kernels/attributes.h"

namespace keras_hvd {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("KerasHvdJobValue")
    .Output("value: int32")
    .Attr("quantity: {'rank', 'size', 'local_rank', 'local_size', 'included'}")
    .Attr("process_set: int = 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
A number of the job that this process is in when the op runs.

value: the number; "included" is 1 in a process that is in the process set, else 0.
quantity: which one.
process_set: whose size, or who is included.
)doc");

class JobValueKernel : public tensorflow::OpKernel {
 public:
  explicit JobValueKernel(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadJobValue(ctx, &which_));
  }

  void Compute(OpKernelContext* ctx) override {
    const absl::StatusOr<int32_t> value = ValueOf(which_);
    OP_REQUIRES_OK(ctx, value.status());
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, tensorflow::TensorShape({}), &output));
    output->scalar<int32_t>()() = *value;
  }

 private:
  JobValue which_;
};

REGISTER_KERNEL_BUILDER(Name("KerasHvdJobValue").Device(tensorflow::DEVICE_CPU),
                        JobValueKernel);
REGISTER_KERNEL_BUILDER(
    Name("KerasHvdJobValue").Device(tensorflow::DEVICE_GPU).HostMemory("value"),
    JobValueKernel);

}  // namespace

absl::Status ReadJobValue(OpKernelConstruction* ctx, JobValue* read) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("quantity", &read->quantity));
  return ReadProcessSet(ctx, &read->process_set);
}

absl::StatusOr<int32_t> ValueOf(const JobValue& which) {
  int32_t value = khvd_process_set_size(which.process_set);
  if (value < 0) return absl::FailedPreconditionError(khvd_last_error());
  if (which.quantity == "rank") value = khvd_rank();
  if (which.quantity == "local_rank") value = khvd_local_rank();
  if (which.quantity == "local_size") value = khvd_local_size();
  if (which.quantity == "included") {
    value = khvd_process_set_rank(which.process_set) >= 0 ? 1 : 0;
  }
  return value;
}

}  // namespace keras_hvd
