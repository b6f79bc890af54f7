// KerasHvdWholeStep: the tensors that it is given, once all of them are there.
#include "tf_ops/kernels/register.h"

namespace keras_hvd {
namespace {

REGISTER_OP("KerasHvdWholeStep")
    .Input("tensors: T")
    .Output("same: T")
    .Output("zero: int32")
    .Attr("T: list(type) >= 1")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* ctx) {
      for (int i = 0; i < ctx->num_inputs(); ++i) ctx->set_output(i, ctx->input(i));
      ctx->set_output(ctx->num_inputs(), ctx->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
The tensors that it is given, once all of them are there.

zero: 0, which nobody knows before.
)doc");

class WholeStepKernel : public tensorflow::OpKernel {
 public:
  using tensorflow::OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    for (int i = 0; i < ctx->num_inputs(); ++i) ctx->set_output(i, ctx->input(i));
    Tensor* zero = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(ctx->num_inputs(), {}, &zero));
    zero->scalar<int32_t>()() = 0;
  }

  bool IsExpensive() override { return false; }
};

KERAS_HVD_REGISTER("KerasHvdWholeStep", WholeStepKernel, .HostMemory("zero"));

}  // namespace
}  // namespace keras_hvd
