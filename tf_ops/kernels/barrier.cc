// KerasHvdBarrier: ends when every rank has reached it.
#include <memory>
#include <utility>

#include "tf_ops/kernels/register.h"
#include "tf_ops/kernels/submit.h"

namespace keras_hvd {
namespace {

REGISTER_OP("KerasHvdBarrier")
    .Attr("tensor_name: string")
    .Attr("process_set: int = 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Ends when every rank has reached it.

tensor_name: matches this rank's request to the other ranks'.
process_set: the ranks that take part.
)doc");

class BarrierKernel : public CollectiveKernel {
 public:
  explicit BarrierKernel(OpKernelConstruction* ctx) : CollectiveKernel(ctx) {}

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    Submission::Submit(std::make_unique<Submission>(ctx, std::move(done)),
                       Request(KHVD_BARRIER, ctx));
  }
};

KERAS_HVD_REGISTER("KerasHvdBarrier", BarrierKernel);

}  // namespace
}  // namespace keras_hvd
