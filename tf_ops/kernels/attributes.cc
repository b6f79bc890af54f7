#include "tf_ops/kernels/attributes.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/platform/errors.h"

namespace keras_hvd {
namespace {

using tensorflow::OpKernelConstruction;

absl::Status ReadScale(OpKernelConstruction* ctx, const char* attribute,
                       double* scale) {
  std::string text;
  TF_RETURN_IF_ERROR(ctx->GetAttr(attribute, &text));
  if (absl::SimpleAtod(text, scale)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(attribute, " must be a number, got '", text, "'"));
}

}  // namespace

absl::Status RequireRows(int dimensions, std::string_view does) {
  if (dimensions >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(does,
                   " along their first dimension, and a scalar has none: give "
                   "it one, with tf.expand_dims(x, 0)"));
}

absl::Status ReadTensorName(OpKernelConstruction* ctx, std::string* name) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("tensor_name", name));
  if (!name->empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      ctx->def().op(), " '", ctx->def().name(),
      "' needs a tensor_name: it is what matches this rank's tensor to the other "
      "ranks'"));
}

absl::Status ReadProcessSet(OpKernelConstruction* ctx, int32_t* set) {
  return ctx->GetAttr("process_set", set);
}

absl::Status ReadReduction(OpKernelConstruction* ctx, Reduction* reduction) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("reduce_op", &reduction->op));
  if (reduction->op < KHVD_AVERAGE || reduction->op > KHVD_ADASUM) {
    return absl::InvalidArgumentError(
        absl::StrCat("reduce_op must be ", static_cast<int>(KHVD_AVERAGE), " to ",
                     static_cast<int>(KHVD_ADASUM), ", got ", reduction->op));
  }
  TF_RETURN_IF_ERROR(ReadScale(ctx, "prescale", &reduction->prescale));
  TF_RETURN_IF_ERROR(ReadScale(ctx, "postscale", &reduction->postscale));
  // The engine would read two zeros as "unscaled"; a single zero means the same factor.
  if (reduction->prescale == 0) reduction->postscale = 1;
  return absl::OkStatus();
}

absl::Status ReadBuckets(OpKernelConstruction* ctx, std::vector<Bucket>* buckets) {
  std::vector<std::string> names, labels;
  std::vector<int64_t> sizes;
  TF_RETURN_IF_ERROR(ctx->GetAttr("tensor_names", &names));
  TF_RETURN_IF_ERROR(ctx->GetAttr("bucket_sizes", &sizes));
  TF_RETURN_IF_ERROR(ctx->GetAttr("labels", &labels));
  int64_t tensors = 0;
  for (const int64_t size : sizes) tensors += size;
  if (names.size() != sizes.size() || labels.size() != sizes.size() ||
      tensors != ctx->num_inputs()) {
    return absl::InvalidArgumentError(
        "each bucket has a name and labels, and each tensor belongs to one bucket");
  }
  for (size_t i = 0; i < names.size(); ++i) {
    buckets->push_back({sizes[i], std::move(names[i]), std::move(labels[i])});
  }
  return absl::OkStatus();
}

}  // namespace keras_hvd
