// The common parts of the collective kernels: attributes, and submission of requests to
// the engine while TensorFlow keeps their buffers alive.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tf_ops/engine/c_api.h"
#include "tf_ops/kernels/attributes.h"

namespace keras_hvd {

// The base of the kernels; reads the attributes common to all collectives.
class CollectiveKernel : public tensorflow::AsyncOpKernel {
 protected:
  explicit CollectiveKernel(tensorflow::OpKernelConstruction* ctx);

  // A request of this kernel for the current step, without tensors.
  khvd_request Request(khvd_kind kind, tensorflow::OpKernelContext* ctx) const;
  int32_t process_set() const { return process_set_; }

 private:
  std::string tensor_name_;
  int32_t process_set_ = 0;
  const uint64_t submitter_;
};

// The base of the kernels that combine the ranks' elements.
class ReductionKernel : public CollectiveKernel {
 protected:
  explicit ReductionKernel(tensorflow::OpKernelConstruction* ctx);

  khvd_request Request(khvd_kind kind, tensorflow::OpKernelContext* ctx) const;

 private:
  Reduction reduction_;
  std::string labels_;
};

// In a shape function: an output has the shape of the input with the same index, but
// another number of rows.
absl::Status SetOtherRows(int index, tensorflow::shape_inference::InferenceContext* c);

// Converts an error of the engine to TensorFlow's.
absl::Status EngineStatus(int code, std::string_view message);

// Tensors in the engine's form; part of a request until it is submitted.
class EngineTensors {
 public:
  // `outputs`: where each result goes; null if it is allocated later.
  EngineTensors(const std::vector<tensorflow::Tensor>& inputs,
                const std::vector<void*>& outputs);

  void AddTo(khvd_request* request) const;

 private:
  std::vector<absl::InlinedVector<int64_t, 4>> shapes_;
  std::vector<khvd_tensor> tensors_;
};

// Marks a request, which already has its tensors, as on a GPU if the kernel runs on
// one. If the engine cannot use that GPU, it reports so.
void AddGpuStream(tensorflow::OpKernelContext* ctx, khvd_request* request);

// One run of a kernel, from ComputeAsync to TensorFlow's continuation.
//
// On a GPU, the continuation comes when the collective is enqueued. Its work on the
// kernel's stream runs after the collective, and so does the buffers' next user.
//
// Cancellation is deliberately ignored: a submitted request concerns the peers too. It
// ends when they have submitted theirs, or with an error when one of them has died.
// Until then TensorFlow keeps the op and the buffers that the engine works on.
class Submission {
 public:
  Submission(tensorflow::OpKernelContext* ctx,
             tensorflow::AsyncOpKernel::DoneCallback done)
      : ctx_(ctx), done_(std::move(done)) {}
  virtual ~Submission() = default;
  Submission(const Submission&) = delete;
  Submission& operator=(const Submission&) = delete;

  // Adds a tensor with its result in `output`, which is allocated and may share
  // `input`'s buffer. Null: Allocate() allocates the result later.
  void Add(const tensorflow::Tensor& input, tensorflow::Tensor* output);
  // Adds the op's input with this index; the output with the same index gets the
  // result, of the same shape.
  absl::Status AddOfSameShape(int index);

  // Hands the request to the engine, with the tensors added so far. `submission` lives
  // until the engine has ended it. If the engine refuses it, the op fails at once.
  static void Submit(std::unique_ptr<Submission> submission, khvd_request request);

 protected:
  // Returns memory for the result of a tensor that is allocated later, or an error.
  // Called for one tensor after another.
  virtual absl::StatusOr<void*> Allocate(int32_t tensor, const int64_t* first_dims,
                                         int32_t count);

  // Allocates the result of a tensor: as many rows as all ranks give.
  absl::StatusOr<void*> AllocateRows(int32_t tensor, const int64_t* first_dims,
                                     int32_t count);

  tensorflow::OpKernelContext* ctx() const { return ctx_; }

 private:
  static void Ended(void* context, int code, const char* message);
  static void* AllocateResult(void* context, int32_t tensor, const int64_t* first_dims,
                              int32_t count);

  tensorflow::OpKernelContext* const ctx_;
  tensorflow::AsyncOpKernel::DoneCallback done_;
  std::vector<tensorflow::Tensor> inputs_;
  std::vector<void*> outputs_;
  const char* name_ = nullptr;  // the kernel's name, which outlives its runs
  absl::Status allocation_;
};

}  // namespace keras_hvd
