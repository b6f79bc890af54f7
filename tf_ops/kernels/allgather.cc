// KerasHvdAllgather: the ranks' tensors one after another, along the first dimension.
#include <cstdint>
#include <memory>
#include <utility>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf_ops/kernels/submit.h"

namespace keras_hvd {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("KerasHvdAllgather")
    .Input("tensors: T")
    .Output("gathered: T")
    .Output("first_dims: int64")
    .Attr("T: list(type) >= 1")
    .Attr("tensor_name: string")
    .Attr("process_set: int = 0")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      for (int i = 0; i < c->num_inputs(); ++i) {
        ShapeHandle gathered;
        TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(i), 1, &gathered));
        if (c->RankKnown(gathered)) {
          TF_RETURN_IF_ERROR(c->ReplaceDim(gathered, 0, c->UnknownDim(), &gathered));
        }
        c->set_output(i, gathered);
      }
      c->set_output(c->num_inputs(), c->Matrix(c->num_inputs(), c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Concatenates the ranks' tensors along their first dimension, in the order of the ranks.

tensors: one tensor, or several that form a group: all of them, or none. At least one
  dimension each; the first may differ between ranks.
gathered: equal on all ranks.
first_dims: how many rows of each tensor each rank gave; the gradient needs them.
tensor_name: matches this rank's request to the other ranks'.
process_set: the ranks that take part.
)doc");

class AllgatherSubmission : public Submission {
 public:
  using Submission::Submission;

 protected:
  absl::StatusOr<void*> Allocate(int32_t tensor, const int64_t* first_dims,
                                 int32_t count) override {
    if (tensor == 0) {
      const int tensors = ctx()->num_inputs();
      TF_RETURN_IF_ERROR(
          ctx()->allocate_output(tensors, TensorShape({tensors, count}), &first_dims_));
    }
    int64_t rows = 0;
    for (int32_t rank = 0; rank < count; ++rank) {
      first_dims_->matrix<int64_t>()(tensor, rank) = first_dims[rank];
      rows += first_dims[rank];
    }
    TensorShape shape = input(tensor).shape();
    TF_RETURN_IF_ERROR(shape.SetDimWithStatus(0, rows));
    Tensor* gathered = nullptr;
    TF_RETURN_IF_ERROR(ctx()->allocate_output(tensor, shape, &gathered));
    return gathered->data();
  }

 private:
  Tensor* first_dims_ = nullptr;
};

class AllgatherKernel : public CollectiveKernel {
 public:
  explicit AllgatherKernel(OpKernelConstruction* ctx) : CollectiveKernel(ctx) {}

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto submission = std::make_unique<AllgatherSubmission>(ctx, done);
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      OP_REQUIRES_ASYNC(
          ctx, ctx->input(i).dims() >= 1,
          absl::InvalidArgumentError(
              "allgather joins tensors along their first dimension, and a "
              "scalar has none: give it one, with tf.expand_dims(x, 0)"),
          done);
      submission->Add(ctx->input(i), nullptr);
    }
    Submission::Submit(std::move(submission), Request(KHVD_ALLGATHER, ctx));
  }
};

REGISTER_KERNEL_BUILDER(Name("KerasHvdAllgather").Device(tensorflow::DEVICE_CPU),
                        AllgatherKernel);
REGISTER_KERNEL_BUILDER(
    Name("KerasHvdAllgather").Device(tensorflow::DEVICE_GPU).HostMemory("first_dims"),
    AllgatherKernel);

}  // namespace
}  // namespace keras_hvd
