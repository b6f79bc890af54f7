// KerasHvdAlltoall: some rows of each rank's tensor.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

#include "tf_ops/kernels/register.h"
#include "tf_ops/kernels/submit.h"

namespace keras_hvd {
namespace {

using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("KerasHvdAlltoall")
    .Input("tensor: T")
    .Input("splits: int64")
    .Output("received: T")
    .Output("received_splits: int64")
    .Attr("T: type")
    .Attr("tensor_name: string")
    .Attr("even: bool")
    .Attr("process_set: int = 0")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      ShapeHandle splits;
      TF_RETURN_IF_ERROR(SetOtherRows(0, c));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &splits));
      c->set_output(1, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Gives each rank some rows of this rank's tensor, and gets some of each rank's.

tensor: at least one dimension; the first may differ between ranks.
splits: how many rows go to each rank, in their order.
received: the rows that rank 0 gave to this one, then those of rank 1, and so on.
received_splits: how many rows came from each rank; the gradient needs them.
tensor_name: matches this rank's request to the other ranks'.
even: as many rows go to each rank, whatever `splits` says.
process_set: the ranks that take part.
)doc");

class AlltoallSubmission : public Submission {
 public:
  using Submission::Submission;

 protected:
  absl::StatusOr<void*> Allocate(int32_t, const int64_t* first_dims,
                                 int32_t count) override {
    Tensor* splits = nullptr;
    TF_RETURN_IF_ERROR(ctx()->allocate_output(1, TensorShape({count}), &splits));
    std::copy_n(first_dims, count, splits->vec<int64_t>().data());
    return AllocateRows(0, first_dims, count);
  }
};

class AlltoallKernel : public CollectiveKernel {
 public:
  explicit AlltoallKernel(OpKernelConstruction* ctx) : CollectiveKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("even", &even_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    OP_REQUIRES_ASYNC(
        ctx, ctx->input(0).dims() >= 1 && ctx->input(1).dims() == 1,
        absl::InvalidArgumentError(
            "alltoall splits a tensor along its first dimension, and a scalar has "
            "none: give it one, with tf.expand_dims(x, 0); splits are a list"),
        done);
    const Tensor splits = ctx->input(1);
    auto submission = std::make_unique<AlltoallSubmission>(ctx, std::move(done));
    submission->Add(ctx->input(0), nullptr);
    khvd_request request = Request(KHVD_ALLTOALL, ctx);
    static const int64_t none = 0;
    if (!even_) {
      request.splits = splits.NumElements() == 0 ? &none : splits.vec<int64_t>().data();
      // A count that does not fit is capped; the engine refuses it all the same.
      request.split_count = static_cast<int32_t>(
          std::min<int64_t>(splits.NumElements(), std::numeric_limits<int32_t>::max()));
    }
    Submission::Submit(std::move(submission), request);
  }

 private:
  bool even_ = false;
};

KERAS_HVD_REGISTER("KerasHvdAlltoall", AlltoallKernel,
                   .HostMemory("splits").HostMemory("received_splits"));

}  // namespace
}  // namespace keras_hvd
