// KerasHvdJobValue: this process's rank and other numbers of the job, at the time the
// op runs. KerasHvdSameJobValue: an error if such a number is no longer that of the
// trace.
#include "tf_ops/kernels/job_value.h"

#include "absl/strings/str_cat.h"
#include "tf_ops/engine/c_api.h"
#include "tf_ops/kernels/attributes.h"
#include "tf_ops/kernels/register.h"

namespace keras_hvd {
namespace {

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
    .Attr("quantity: {'rank', 'size', 'local_rank', 'local_size', 'included'}")
    .Attr("process_set: int = 0")
    .Attr("value: int")
    .Attr("place: string")
    .Attr("dataset: string = ''")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
An error if a number of the job is no longer what it was when the graph was built.

quantity: as for KerasHvdJobValue.
process_set: as for KerasHvdJobValue.
value: what the number was.
place: where in its job this process was, for the error.
dataset: the function that made the dataset whose graph it is, if it is one's.
)doc");

class JobValueKernel : public tensorflow::OpKernel {
 public:
  explicit JobValueKernel(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadJobValue(ctx, &which_));
  }

  void Compute(OpKernelContext* ctx) override {
    const absl::StatusOr<int32_t> value = ValueOf(which_);
    OP_REQUIRES_OK(ctx, value.status());
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &output));
    output->scalar<int32_t>()() = *value;
  }

 private:
  JobValue which_;
};

// The reason why a number is another one in this job; empty if it is the same.
std::string WhyOther(const FixedValue& fixed) {
  if (khvd_is_initialized() == 0) return "";
  const JobValue& which = fixed.which;
  const absl::StatusOr<int32_t> now = ValueOf(which);
  if (!now.ok()) return std::string(now.status().message());
  if (*now == fixed.value) return "";
  const std::string of_set =
      which.process_set == 0 ? "" : absl::StrCat(" of process set ", which.process_set);
  return absl::StrCat(which.quantity, of_set, " was ", fixed.value, " then and is ",
                      *now, " now");
}

class SameJobValueKernel : public tensorflow::OpKernel {
 public:
  explicit SameJobValueKernel(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadFixedValue(ctx, &fixed_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dataset", &dataset_));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(
        ctx, dataset_.empty() ? RequireSame(name(), fixed_) : RequireSameForDataset());
  }

 private:
  absl::Status RequireSameForDataset() const {
    const std::string why = WhyOther(fixed_);
    if (why.empty()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        dataset_, ": this dataset was made by ", fixed_.place, ", and is read by ",
        PlaceInJob(), " of another job, for which it would be wrong: ", why,
        ". Make it anew after keras_hvd.init()"));
  }

  FixedValue fixed_;
  std::string dataset_;
};

KERAS_HVD_REGISTER("KerasHvdJobValue", JobValueKernel, .HostMemory("value"));
KERAS_HVD_REGISTER("KerasHvdSameJobValue", SameJobValueKernel);

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
  const std::string why = WhyOther(fixed);
  if (why.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      op, ": this function was traced by ", fixed.place, ", and is run by ",
      PlaceInJob(), " of another job, for which it would be wrong: ", why,
      ". Trace it again: make a new tf.function, or call compile() of the Keras model. "
      "fit() and train_on_batch() do that by themselves"));
}

}  // namespace keras_hvd
