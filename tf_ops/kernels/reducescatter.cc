// KerasHvdReducescatter: some rows of the element-wise reduction of all ranks' tensors.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "tf_ops/kernels/register.h"
#include "tf_ops/kernels/submit.h"

namespace keras_hvd {
namespace {

REGISTER_OP("KerasHvdReducescatter")
    .Input("tensors: T")
    .Output("reduced: T")
    .Attr("T: list(type) >= 1")
    .Attr("tensor_name: string")
    .Attr("reduce_op: int")
    .Attr("prescale: string = '1'")
    .Attr("postscale: string = '1'")
    .Attr("process_set: int = 0")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      for (int i = 0; i < c->num_inputs(); ++i) {
        TF_RETURN_IF_ERROR(SetOtherRows(i, c));
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reduces tensors element-wise over all ranks, of which each gets some rows.

tensors: one tensor, or several that form a group: all of them, or none. At least one
  dimension each.
reduced: this rank's rows: as many as the others', and the first ranks' one more where
  the first dimension does not divide.
tensor_name: matches this rank's request to the other ranks'.
reduce_op: a khvd_reduce_op.
prescale: multiplies each rank's elements before the reduction; a decimal number, since
  a float attribute would cut a double short.
postscale: multiplies the result.
process_set: the ranks that take part.
)doc");

class ReducescatterKernel : public ReductionKernel {
 public:
  explicit ReducescatterKernel(OpKernelConstruction* ctx) : ReductionKernel(ctx) {}

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto submission = std::make_unique<Submission>(ctx, done);
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      TensorShape shape = ctx->input(i).shape();
      OP_REQUIRES_OK_ASYNC(
          ctx, RequireRows(shape.dims(), "reducescatter splits tensors"), done);
      // If the engine does not know the number, it reports so when it gets the request.
      const int64_t rows = khvd_scattered_rows(process_set(), shape.dim_size(0));
      OP_REQUIRES_OK_ASYNC(ctx, shape.SetDimWithStatus(0, std::max<int64_t>(rows, 0)),
                           done);
      Tensor* output = nullptr;
      OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(i, shape, &output), done);
      submission->Add(ctx->input(i), output);
    }
    Submission::Submit(std::move(submission), Request(KHVD_REDUCESCATTER, ctx));
  }
};

KERAS_HVD_REGISTER("KerasHvdReducescatter", ReducescatterKernel);

}  // namespace
}  // namespace keras_hvd
