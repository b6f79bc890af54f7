// KerasHvdBroadcast: one rank's tensor, on every rank.
#include <memory>
#include <utility>

#include "tf_ops/kernels/register.h"
#include "tf_ops/kernels/submit.h"

namespace keras_hvd {
namespace {

REGISTER_OP("KerasHvdBroadcast")
    .Input("tensor: T")
    .Output("value: T")
    .Attr("T: type")
    .Attr("tensor_name: string")
    .Attr("root_rank: int")
    .Attr("process_set: int = 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(R"doc(
Gives every rank the tensor of the root rank.

tensor: the value on the root; elsewhere only its shape and type count.
value: the root's tensor.
tensor_name: matches this rank's request to the other ranks'.
root_rank: the rank whose tensor it is.
process_set: the ranks that take part.
)doc");

class BroadcastKernel : public CollectiveKernel {
 public:
  explicit BroadcastKernel(OpKernelConstruction* ctx) : CollectiveKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("root_rank", &root_rank_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto submission = std::make_unique<Submission>(ctx, done);
    OP_REQUIRES_OK_ASYNC(ctx, submission->AddOfSameShape(0), done);
    khvd_request request = Request(KHVD_BROADCAST, ctx);
    request.root = root_rank_;
    Submission::Submit(std::move(submission), request);
  }

 private:
  int32_t root_rank_ = 0;
};

KERAS_HVD_REGISTER("KerasHvdBroadcast", BroadcastKernel);

}  // namespace
}  // namespace keras_hvd
