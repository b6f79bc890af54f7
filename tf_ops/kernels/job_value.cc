// KerasHvdJobValue: this process's rank and other numbers of the job, at the time the
// op runs. KerasHvdSameJobValue: an error if such a number is no longer that of the
// trace. KerasHvdNoteChange: an optimizer reduces in another way from now on.
#include "tf_ops/kernels/job_value.h"

#include <mutex>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/engine/c_api.h"
#include "tf_ops/kernels/attributes.h"

namespace keras_hvd {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("KerasHvdJobValue")
    .Output("value: int32")
    .Attr("quantity: {'rank', 'size', 'local_rank', 'local_size', 'included'}")
    .Attr("process_set: int = 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
A number of the job that this process is in when the op runs.

value: the number; "included" is 1 in a process that is in the process set, else 0.
quantity: which one.
process_set: whose size, whose rank (-1 outside of it), or who is included.
)doc");

REGISTER_OP("KerasHvdSameJobValue")
    .Attr(
        "quantity: {'rank', 'size', 'local_rank', 'local_size', 'included', "
        "'changes'}")
    .Attr("process_set: int = 0")
    .Attr("value: int")
    .Attr("place: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
An error if a number of the job is no longer what it was when the graph was built.

quantity: as for KerasHvdJobValue; or "changes", of how an optimizer reduces.
process_set: as for KerasHvdJobValue; for "changes" the optimizer's number.
value: what the number was.
place: for the error, where in its job this process was; for "changes" the optimizer.
)doc");

REGISTER_OP("KerasHvdNoteChange")
    .Attr("optimizer: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Notes that an optimizer reduces its gradients in another way from now on.

optimizer: its number in this process.
)doc");

// How often each optimizer has changed.
class Changes {
 public:
  static Changes& OfProcess() {
    static auto* const changes = new Changes;
    return *changes;
  }

  void Note(int32_t optimizer) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++changes_[optimizer];
  }

  int32_t Of(int32_t optimizer) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = changes_.find(optimizer);
    return found == changes_.end() ? 0 : found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int32_t, int32_t> changes_;
};

class JobValueKernel : public tensorflow::OpKernel {
 public:
  explicit JobValueKernel(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadJobValue(ctx, &which_));
  }

  void Compute(OpKernelContext* ctx) override {
    const absl::StatusOr<int32_t> value = ValueOf(which_);
    OP_REQUIRES_OK(ctx, value.status());
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, tensorflow::TensorShape({}), &output));
    output->scalar<int32_t>()() = *value;
  }

 private:
  JobValue which_;
};

class SameJobValueKernel : public tensorflow::OpKernel {
 public:
  explicit SameJobValueKernel(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadFixedValue(ctx, &fixed_));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, RequireSame(name(), fixed_));
  }

 private:
  FixedValue fixed_;
};

class NoteChangeKernel : public tensorflow::OpKernel {
 public:
  explicit NoteChangeKernel(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("optimizer", &optimizer_));
  }

  void Compute(OpKernelContext*) override { Changes::OfProcess().Note(optimizer_); }

 private:
  int32_t optimizer_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("KerasHvdJobValue").Device(tensorflow::DEVICE_CPU),
                        JobValueKernel);
REGISTER_KERNEL_BUILDER(
    Name("KerasHvdJobValue").Device(tensorflow::DEVICE_GPU).HostMemory("value"),
    JobValueKernel);
REGISTER_KERNEL_BUILDER(Name("KerasHvdSameJobValue").Device(tensorflow::DEVICE_CPU),
                        SameJobValueKernel);
REGISTER_KERNEL_BUILDER(Name("KerasHvdSameJobValue").Device(tensorflow::DEVICE_GPU),
                        SameJobValueKernel);
REGISTER_KERNEL_BUILDER(Name("KerasHvdNoteChange").Device(tensorflow::DEVICE_CPU),
                        NoteChangeKernel);

absl::Status RequireUnchanged(std::string_view op, const FixedValue& fixed) {
  if (Changes::OfProcess().Of(fixed.which.process_set) == fixed.value) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      op, ": this function was traced before ", fixed.place,
      " was distributed, or got other local variables, and would go on without that. "
      "Trace it again: make a new tf.function, after the optimizer is complete"));
}

}  // namespace

absl::Status ReadJobValue(OpKernelConstruction* ctx, JobValue* read) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("quantity", &read->quantity));
  return ReadProcessSet(ctx, &read->process_set);
}

absl::StatusOr<int32_t> ValueOf(const JobValue& which) {
  int32_t value = khvd_process_set_size(which.process_set);
  if (value < 0) return absl::FailedPreconditionError(khvd_last_error());
  if (which.quantity == "rank") value = khvd_process_set_rank(which.process_set);
  if (which.quantity == "local_rank") value = khvd_local_rank();
  if (which.quantity == "local_size") value = khvd_local_size();
  if (which.quantity == "included") {
    value = khvd_process_set_rank(which.process_set) >= 0 ? 1 : 0;
  }
  return value;
}

absl::Status ReadFixedValue(OpKernelConstruction* ctx, FixedValue* read) {
  TF_RETURN_IF_ERROR(ReadJobValue(ctx, &read->which));
  TF_RETURN_IF_ERROR(ctx->GetAttr("value", &read->value));
  return ctx->GetAttr("place", &read->place);
}

std::string PlaceInJob() {
  return absl::StrCat("rank ", khvd_rank(), " of ", khvd_size());
}

absl::Status RequireSame(std::string_view op, const FixedValue& fixed) {
  if (khvd_is_initialized() == 0) return absl::OkStatus();
  const JobValue& which = fixed.which;
  if (which.quantity == "changes") return RequireUnchanged(op, fixed);
  const absl::StatusOr<int32_t> now = ValueOf(which);
  if (now.ok() && *now == fixed.value) return absl::OkStatus();
  const std::string of_set =
      which.process_set == 0 ? "" : absl::StrCat(" of process set ", which.process_set);
  const std::string why = now.ok()
                              ? absl::StrCat(which.quantity, of_set, " was ",
                                             fixed.value, " then and is ", *now, " now")
                              : std::string(now.status().message());
  return absl::FailedPreconditionError(absl::StrCat(
      op, ": this function was traced by ", fixed.place, ", and is run by ",
      PlaceInJob(), " of another job, for which it would be wrong: ", why,
      ". Trace it again: make a new tf.function, or call compile() of the Keras "
      "model. ",
      "fit() with a callback of keras_hvd does that by itself"));
}

}  // namespace keras_hvd
