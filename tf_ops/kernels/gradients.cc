// KerasHvdGradients: the gradients of a step that was traced to be compiled by XLA.
//
// Outside XLA, one op per bucket is enough (KerasHvdAllreduce): each runs when its
// gradients are ready. XLA plans memory as if a program ran one instruction after
// another, and would give a bucket's memory to the next layer as soon as the bucket's
// result is ready, so backprop would wait for each bucket. This op therefore takes all
// buckets and asks for no result before all of them have left (xla_kernels.cc).
//
// The kernel here serves a function that was first traced inside a compiled one and is
// then called by itself: TensorFlow reuses that trace.
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tf_ops/kernels/register.h"
#include "tf_ops/kernels/submit.h"
#include "tf_ops/kernels/submitter.h"

namespace keras_hvd {
namespace {

REGISTER_OP("KerasHvdGradients")
    .Input("tensors: T")
    .Output("reduced: T")
    .Attr("T: list(type) >= 1")
    .Attr("bucket_sizes: list(int) >= 1")
    .Attr("tensor_names: list(string) >= 1")
    .Attr("labels: list(string) >= 1")
    .Attr("reduce_op: int")
    .Attr("prescale: string = '1'")
    .Attr("postscale: string = '1'")
    .Attr("process_set: int = 0")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      for (int i = 0; i < c->num_inputs(); ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reduces buckets of tensors over all ranks, each as KerasHvdAllreduce would; under XLA.

tensors: bucket after bucket, in the order in which they are computed.
reduced: the results, equal on all ranks.
bucket_sizes: how many tensors each bucket has.
tensor_names: one for each bucket; matches this rank's request to the other ranks'.
labels: for each bucket those of KerasHvdAllreduce.
reduce_op: a khvd_reduce_op.
prescale: multiplies each rank's elements before the reduction.
postscale: multiplies the result.
process_set: the ranks that take part.
)doc");

class GradientsKernel : public tensorflow::AsyncOpKernel {
 public:
  explicit GradientsKernel(OpKernelConstruction* ctx)
      : AsyncOpKernel(ctx), submitter_(NextSubmitter()) {
    OP_REQUIRES_OK(ctx, ReadBuckets(ctx, &buckets_));
    OP_REQUIRES_OK(ctx, ReadReduction(ctx, &reduction_));
    OP_REQUIRES_OK(ctx, ReadProcessSet(ctx, &process_set_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    ReduceFrom(0, 0, ctx, std::move(done));
  }

 private:
  // Reduces the bucket at `index`, with first tensor `first`, then the following ones.
  // It continues after an error, since the other ranks may have submitted them all.
  void ReduceFrom(size_t index, int first, OpKernelContext* ctx, DoneCallback done) {
    if (index == buckets_.size()) return done();
    const Bucket& bucket = buckets_[index];
    const int end = first + static_cast<int>(bucket.size);
    auto submission = std::make_unique<Submission>(
        ctx, [this, index, end, ctx, done] { ReduceFrom(index + 1, end, ctx, done); });
    for (int i = first; i < end; ++i) {
      OP_REQUIRES_OK_ASYNC(ctx, submission->AddOfSameShape(i), done);
    }
    khvd_request request = {};
    request.struct_size = sizeof(request);
    request.kind = KHVD_ALLREDUCE;
    request.name = bucket.name.c_str();
    request.submitter =
        SubmitterInCall(submitter_, static_cast<uint64_t>(ctx->step_id()));
    request.process_set = process_set_;
    request.labels = bucket.labels.c_str();
    reduction_.AddTo(&request);
    Submission::Submit(std::move(submission), request);
  }

  const uint64_t submitter_;
  std::vector<Bucket> buckets_;
  Reduction reduction_;
  int32_t process_set_ = 0;
};

KERAS_HVD_REGISTER("KerasHvdGradients", GradientsKernel);

}  // namespace
}  // namespace keras_hvd
