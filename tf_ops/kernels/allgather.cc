// KerasHvdAllgather: the ranks' tensors one after another, along the first dimension.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "tf_ops/kernels/register.h"
#include "tf_ops/kernels/submit.h"

namespace keras_hvd {
namespace {

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
        TF_RETURN_IF_ERROR(SetOtherRows(i, c));
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
    std::copy_n(first_dims, count, &first_dims_->matrix<int64_t>()(tensor, 0));
    return AllocateRows(tensor, first_dims, count);
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
      OP_REQUIRES_OK_ASYNC(
          ctx, RequireRows(ctx->input(i).dims(), "allgather joins tensors"), done);
      submission->Add(ctx->input(i), nullptr);
    }
    Submission::Submit(std::move(submission), Request(KHVD_ALLGATHER, ctx));
  }
};

KERAS_HVD_REGISTER("KerasHvdAllgather", AllgatherKernel, .HostMemory("first_dims"));

}  // namespace
}  // namespace keras_hvd
