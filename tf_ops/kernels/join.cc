// KerasHvdJoin: ends when every rank has run out of data.
#include <cstdint>
#include <utility>

#include "tensorflow/core/platform/env.h"
#include "tf_ops/engine/c_api.h"
#include "tf_ops/kernels/register.h"
#include "tf_ops/kernels/submit.h"

namespace keras_hvd {
namespace {

REGISTER_OP("KerasHvdJoin")
    .Output("last: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Ends when every rank has joined. Until then this rank gives zeros to allreduces.

last: the rank that joined last.
)doc");

class JoinKernel : public tensorflow::AsyncOpKernel {
 public:
  explicit JoinKernel(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {}

  // The others may train for long, so a thread of its own waits for them.
  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    Tensor* last = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(0, TensorShape({}), &last), done);
    ctx->env()->SchedClosure([ctx, last, done = std::move(done)] {
      const int code = khvd_join(&last->scalar<int32_t>()());
      if (code != KHVD_OK) ctx->SetStatus(EngineStatus(code, khvd_last_error()));
      done();
    });
  }
};

KERAS_HVD_REGISTER("KerasHvdJoin", JoinKernel, .HostMemory("last"));

}  // namespace
}  // namespace keras_hvd
