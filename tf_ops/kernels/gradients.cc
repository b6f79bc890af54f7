// KerasHvdGradients: the gradients of a step, in a program compiled by XLA.
//
// Outside of XLA an op for each bucket is enough (KerasHvdAllreduce): each runs when
// its gradients are there. XLA plans memory as if a program ran one instruction after
// another, and would give a bucket's memory to the next layer as soon as the bucket's
// result is there: backprop would wait for each bucket. So this op has them all, and no
// result is asked for before all buckets have left (xla_kernels.cc).
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf_ops/kernels/attributes.h"

namespace keras_hvd {
namespace {

REGISTER_OP("KerasHvdGradients")
    .Input("tensors: T")
    .Output("reduced: T")
    .Attr("T: list(" KERAS_HVD_DTYPES ") >= 1")
    .Attr("bucket_sizes: list(int) >= 1")
    .Attr("tensor_names: list(string) >= 1")
    .Attr("marks: list(int) >= 1")
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
marks: one for each bucket, which tells its variables: the length of a tensor of uint8
  without elements, [0, mark], that every rank's bucket ends with.
reduce_op: a khvd_reduce_op.
prescale: multiplies each rank's elements before the reduction.
postscale: multiplies the result.
process_set: the ranks that take part.
)doc");

}  // namespace
}  // namespace keras_hvd
