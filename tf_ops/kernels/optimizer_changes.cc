// KerasHvdNoteChange: an optimizer reduces its gradients in another way from now on.
// KerasHvdRequireUnchanged: an error if it has done so since the graph was built.
#include <mutex>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "tf_ops/engine/c_api.h"
#include "tf_ops/kernels/register.h"

namespace keras_hvd {
namespace {

REGISTER_OP("KerasHvdNoteChange")
    .Attr("optimizer: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Notes that an optimizer reduces its gradients in another way from now on.

optimizer: its number in this process.
)doc");

REGISTER_OP("KerasHvdRequireUnchanged")
    .Attr("optimizer: int")
    .Attr("changes: int")
    .Attr("title: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
An error if an optimizer reduces otherwise than when the graph was built.

optimizer: its number in this process.
changes: how often it had changed then.
title: what it is, for the error.
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

class NoteChangeKernel : public tensorflow::OpKernel {
 public:
  explicit NoteChangeKernel(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("optimizer", &optimizer_));
  }

  void Compute(OpKernelContext*) override { Changes::OfProcess().Note(optimizer_); }

 private:
  int32_t optimizer_ = 0;
};

class RequireUnchangedKernel : public tensorflow::OpKernel {
 public:
  explicit RequireUnchangedKernel(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("optimizer", &optimizer_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("changes", &changes_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("title", &title_));
  }

  void Compute(OpKernelContext* ctx) override {
    const bool is_unchanged = Changes::OfProcess().Of(optimizer_) == changes_;
    OP_REQUIRES(
        ctx, is_unchanged || khvd_is_initialized() == 0,
        absl::FailedPreconditionError(absl::StrCat(
            name(), ": this function was traced before ", title_,
            " was distributed, or got other local variables, and would go on without "
            "that. Trace it again: make a new tf.function, after the optimizer is "
            "complete")));
  }

 private:
  int32_t optimizer_ = 0;
  int32_t changes_ = 0;
  std::string title_;
};

REGISTER_KERNEL_BUILDER(Name("KerasHvdNoteChange").Device(tensorflow::DEVICE_CPU),
                        NoteChangeKernel);
KERAS_HVD_REGISTER("KerasHvdRequireUnchanged", RequireUnchangedKernel);

}  // namespace
}  // namespace keras_hvd
