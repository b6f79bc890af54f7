#include "tf_ops/kernels/submit.h"

#include <numeric>

#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tf_ops/kernels/completion.h"
#include "tf_ops/kernels/element_types.h"
#include "tf_ops/kernels/submitter.h"
#include "tf_ops/kernels/trace.h"
#include "xla/stream_executor/stream.h"

namespace keras_hvd {
namespace {

using tensorflow::Tensor;

// The ops accept all types, because a list of types in an attribute cannot name float8.
// Quantized and 4-bit numbers are only moved: their Python ops pass them as the
// integers that store them.
khvd_dtype EngineType(tensorflow::DataType dtype) {
  switch (dtype) {
#define KERAS_HVD_TYPE(ENGINE, TENSORFLOW, XLA) \
  case tensorflow::DT_##TENSORFLOW: return KHVD_##ENGINE;
    KERAS_HVD_ELEMENT_TYPES(KERAS_HVD_TYPE)
#undef KERAS_HVD_TYPE
    case tensorflow::DT_QUINT8:
    case tensorflow::DT_UINT4: return KHVD_UINT8;
    case tensorflow::DT_QINT8:
    case tensorflow::DT_INT4: return KHVD_INT8;
    case tensorflow::DT_QINT16: return KHVD_INT16;
    case tensorflow::DT_QUINT16: return KHVD_UINT16;
    case tensorflow::DT_QINT32: return KHVD_INT32;
    default:  // refused by the engine
      return static_cast<khvd_dtype>(-1);
  }
}

// Marks an op beside which others can run, such as backprop beside the reduction of
// gradients. keras_hvd.backends.tensorflow.collectives.submission sets it.
constexpr char kLeavesThread[] = "_keras_hvd_leaves_thread";

// Whether the op's thread has nothing better to do than drive the engine.
bool MayDrive(const tensorflow::OpKernel& op) {
  return !tensorflow::HasNodeAttr(op.def(), kLeavesThread);
}

// The request that this thread is handing to the engine, which may end it meanwhile.
thread_local const void* submitting = nullptr;

}  // namespace

absl::Status SetOtherRows(int index, tensorflow::shape_inference::InferenceContext* c) {
  tensorflow::shape_inference::ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(index), 1, &shape));
  if (c->RankKnown(shape)) {
    TF_RETURN_IF_ERROR(c->ReplaceDim(shape, 0, c->UnknownDim(), &shape));
  }
  c->set_output(index, shape);
  return absl::OkStatus();
}

absl::Status EngineStatus(int code, std::string_view message) {
  switch (code) {
    case KHVD_OK: return absl::OkStatus();
    case KHVD_INVALID_ARGUMENT: return absl::InvalidArgumentError(message);
    case KHVD_RANK_FAILED: return absl::AbortedError(message);
    case KHVD_MISMATCH:
    case KHVD_NOT_INITIALIZED:
    case KHVD_SHUT_DOWN:
    case KHVD_FORKED: return absl::FailedPreconditionError(message);
    default: return absl::InternalError(message);
  }
}

CollectiveKernel::CollectiveKernel(tensorflow::OpKernelConstruction* ctx)
    : AsyncOpKernel(ctx), submitter_(NextSubmitter()) {
  OP_REQUIRES_OK(ctx, StartCompletionThread());
  OP_REQUIRES_OK(ctx, ReadTensorName(ctx, &tensor_name_));
  OP_REQUIRES_OK(ctx, ReadProcessSet(ctx, &process_set_));
}

khvd_request CollectiveKernel::Request(khvd_kind kind,
                                       tensorflow::OpKernelContext* ctx) const {
  khvd_request request = {};
  request.struct_size = sizeof(request);
  request.kind = kind;
  request.name = tensor_name_.c_str();
  request.submitter =
      SubmitterInCall(submitter_, static_cast<uint64_t>(ctx->step_id()));
  request.process_set = process_set_;
  return request;
}

ReductionKernel::ReductionKernel(tensorflow::OpKernelConstruction* ctx)
    : CollectiveKernel(ctx) {
  OP_REQUIRES_OK(ctx, ReadReduction(ctx, &reduction_));
  if (ctx->HasAttr("labels")) OP_REQUIRES_OK(ctx, ctx->GetAttr("labels", &labels_));
}

khvd_request ReductionKernel::Request(khvd_kind kind,
                                      tensorflow::OpKernelContext* ctx) const {
  khvd_request request = CollectiveKernel::Request(kind, ctx);
  reduction_.AddTo(&request);
  request.labels = labels_.c_str();
  return request;
}

EngineTensors::EngineTensors(const std::vector<Tensor>& inputs,
                             const std::vector<void*>& outputs)
    : shapes_(inputs.size()), tensors_(inputs.size()) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto sizes = inputs[i].shape().dim_sizes();
    shapes_[i].assign(sizes.begin(), sizes.end());
    tensors_[i].dtype = EngineType(inputs[i].dtype());
    tensors_[i].rank = inputs[i].dims();
    tensors_[i].shape = shapes_[i].data();
    tensors_[i].input = inputs[i].data();
    tensors_[i].output = outputs[i];
  }
}

void EngineTensors::AddTo(khvd_request* request) const {
  request->count = static_cast<int32_t>(tensors_.size());
  request->tensors = tensors_.data();
}

void AddGpuStream(tensorflow::OpKernelContext* ctx, khvd_request* request) {
  // A barrier has no work on a GPU: it is passed when the ranks have reached it.
  if (request->count == 0) return;
  tensorflow::DeviceContext* const device = ctx->op_device_context();
  if (device == nullptr || device->stream() == nullptr) return;
  request->on_gpu = 1;
  request->stream = device->stream()->platform_specific_handle().stream;
}

void Submission::Add(const Tensor& input, Tensor* output) {
  inputs_.push_back(input);
  outputs_.push_back(output == nullptr ? nullptr : output->data());
}

absl::Status Submission::AddOfSameShape(int index) {
  const Tensor& input = ctx_->input(index);
  Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(
      ctx_->forward_input_or_allocate_output({index}, index, input.shape(), &output));
  Add(input, output);
  return absl::OkStatus();
}

void Submission::Submit(std::unique_ptr<Submission> submission, khvd_request request) {
  const EngineTensors tensors(submission->inputs_, submission->outputs_);
  tensors.AddTo(&request);
  AddGpuStream(submission->ctx_, &request);
  request.done = &Submission::Ended;
  request.allocate = &Submission::AllocateResult;
  request.context = submission.get();
  submission->name_ = request.name;
  TraceStart(request.name);
  const auto submit =
      MayDrive(submission->ctx_->op_kernel()) ? &khvd_submit_and_drive : &khvd_submit;

  // Once the engine has it, the request may end and be deleted before submit returns.
  Submission* const submitted = submission.release();
  submitting = submitted;
  const int code = submit(&request);
  submitting = nullptr;
  if (code == KHVD_OK) return;
  submission.reset(submitted);
  submission->ctx_->SetStatus(EngineStatus(code, khvd_last_error()));
  submission->done_();
}

absl::StatusOr<void*> Submission::Allocate(int32_t, const int64_t*, int32_t) {
  return absl::InternalError("this collective's results are allocated at its start");
}

absl::StatusOr<void*> Submission::AllocateRows(int32_t tensor,
                                               const int64_t* first_dims,
                                               int32_t count) {
  tensorflow::TensorShape shape = inputs_[tensor].shape();
  const int64_t rows = std::accumulate(first_dims, first_dims + count, int64_t{0});
  TF_RETURN_IF_ERROR(shape.SetDimWithStatus(0, rows));
  Tensor* result = nullptr;
  TF_RETURN_IF_ERROR(ctx_->allocate_output(tensor, shape, &result));
  return result->data();
}

void* Submission::AllocateResult(void* context, int32_t tensor,
                                 const int64_t* first_dims, int32_t count) {
  auto* const submission = static_cast<Submission*>(context);
  const absl::StatusOr<void*> memory = submission->Allocate(tensor, first_dims, count);
  if (!memory.ok()) {
    submission->allocation_ = memory.status();
    return nullptr;
  }
  // An empty result has no buffer, but null would mean that allocation failed.
  static char empty;
  return *memory == nullptr ? &empty : *memory;
}

void Submission::Ended(void* context, int code, const char* message) {
  std::unique_ptr<Submission> submission(static_cast<Submission*>(context));
  TraceEnd(submission->name_);
  submission->ctx_->SetStatus(submission->allocation_.ok() ? EngineStatus(code, message)
                                                           : submission->allocation_);
  // Drop our references first, so later ops can reuse the buffers. The last reference
  // is never dropped here, where freeing a large buffer would hold everything up.
  tensorflow::AsyncOpKernel::DoneCallback done = std::move(submission->done_);
  submission.reset();
  // On the op's own thread, the continuation may run at once, as after any other op.
  if (context == submitting) return done();
  CompleteLater(std::move(done));
}

}  // namespace keras_hvd
