// KerasHvdAllreduce: element-wise reduction of one tensor, or of a group, over all
// ranks.
#include <memory>
#include <utility>

#include "tf_ops/kernels/register.h"
#include "tf_ops/kernels/submit.h"

namespace keras_hvd {
namespace {

REGISTER_OP("KerasHvdAllreduce")
    .Input("tensors: T")
    .Output("reduced: T")
    .Attr("T: list(type) >= 1")
    .Attr("tensor_name: string")
    .Attr("reduce_op: int")
    .Attr("prescale: string = '1'")
    .Attr("postscale: string = '1'")
    .Attr("process_set: int = 0")
    .Attr("labels: string = ''")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      for (int i = 0; i < c->num_inputs(); ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reduces tensors element-wise over all ranks; all of them, or none.

tensors: one tensor, or several that form a group.
reduced: the results, equal on all ranks.
tensor_name: matches this rank's request to the other ranks'.
reduce_op: a khvd_reduce_op.
prescale: multiplies each rank's elements before the reduction; a decimal number, since
  a float attribute would cut a double short.
postscale: multiplies the result.
process_set: the ranks that take part.
labels: what the ranks have to agree on besides shapes and types: a line for each
  tensor, and perhaps more.
)doc");

class AllreduceKernel : public ReductionKernel {
 public:
  explicit AllreduceKernel(OpKernelConstruction* ctx) : ReductionKernel(ctx) {}

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto submission = std::make_unique<Submission>(ctx, done);
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      OP_REQUIRES_OK_ASYNC(ctx, submission->AddOfSameShape(i), done);
    }
    Submission::Submit(std::move(submission), Request(KHVD_ALLREDUCE, ctx));
  }
};

KERAS_HVD_REGISTER("KerasHvdAllreduce", AllreduceKernel);

}  // namespace
}  // namespace keras_hvd
