// KerasHvdAllgather: the ranks' tensors one after another, along the first dimension.
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
    .Input("tensor: T")
    .Output("gathered: T")
    .Output("first_dims: int64")
    .Attr("T: " KERAS_HVD_DTYPES)
    .Attr("tensor_name: string")
    .Attr("process_set: int = 0")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      ShapeHandle gathered;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &gathered));
      if (c->RankKnown(gathered)) {
        TF_RETURN_IF_ERROR(c->ReplaceDim(gathered, 0, c->UnknownDim(), &gathered));
      }
      c->set_output(0, gathered);
      c->set_output(1, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Concatenates the ranks' tensors along their first dimension, in the order of the ranks.

tensor: at least one dimension; the first may differ between ranks.
gathered: equal on all ranks.
first_dims: how many rows each rank gave; the gradient needs them.
tensor_name: matches this rank's request to the other ranks'.
process_set: the ranks that take part.
)doc");

class AllgatherSubmission : public Submission {
 public:
  using Submission::Submission;

 protected:
  absl::StatusOr<void*> Allocate(const int64_t* first_dims, int32_t count) override {
    Tensor* sizes = nullptr;
    TF_RETURN_IF_ERROR(ctx()->allocate_output(1, TensorShape({count}), &sizes));
    int64_t rows = 0;
    for (int32_t rank = 0; rank < count; ++rank) {
      sizes->vec<int64_t>()(rank) = first_dims[rank];
      rows += first_dims[rank];
    }
    TensorShape shape = input(0).shape();
    TF_RETURN_IF_ERROR(shape.SetDimWithStatus(0, rows));
    Tensor* gathered = nullptr;
    TF_RETURN_IF_ERROR(ctx()->allocate_output(0, shape, &gathered));
    return gathered->data();
  }
};

class AllgatherKernel : public CollectiveKernel {
 public:
  explicit AllgatherKernel(OpKernelConstruction* ctx) : CollectiveKernel(ctx) {}

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    OP_REQUIRES_ASYNC(ctx, ctx->input(0).dims() >= 1,
                      absl::InvalidArgumentError(
                          "allgather joins tensors along their first dimension, and a "
                          "scalar has none: give it one, with tf.expand_dims(x, 0)"),
                      done);
    auto submission = std::make_unique<AllgatherSubmission>(ctx, std::move(done));
    submission->Add(ctx->input(0), nullptr);
    Submission::Submit(std::move(submission), Request(KHVD_ALLGATHER));
  }
};

REGISTER_KERNEL_BUILDER(Name("KerasHvdAllgather").Device(tensorflow::DEVICE_CPU),
                        AllgatherKernel);

}  // namespace
}  // namespace keras_hvd
