// What the collective kernels share: their common attributes, and handing a request to
// the engine while TensorFlow keeps its buffers alive.
#ifndef KERAS_HVD_TF_OPS_KERNELS_SUBMIT_H_
#define KERAS_HVD_TF_OPS_KERNELS_SUBMIT_H_

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
#include "tensorflow/core/framework/tensor.h"
#include "tf_ops/engine/c_api.h"
#include "tf_ops/kernels/attributes.h"

namespace keras_hvd {

// The base of the kernels: reads the attributes that all collectives have.
class CollectiveKernel : public tensorflow::AsyncOpKernel {
 protected:
  explicit CollectiveKernel(tensorflow::OpKernelConstruction* ctx);

  // A request of this kernel, in the step that it runs in, without tensors.
  khvd_request Request(khvd_kind kind, tensorflow::OpKernelContext* ctx) const;
  int32_t process_set() const { return process_set_; }

 private:
  std::string tensor_name_;
  int32_t process_set_ = 0;
  const uint64_t submitter_;
};

// The base of those that combine the ranks' elements.
class ReductionKernel : public CollectiveKernel {
 protected:
  explicit ReductionKernel(tensorflow::OpKernelConstruction* ctx);

  khvd_request Request(khvd_kind kind, tensorflow::OpKernelContext* ctx) const;

 private:
  Reduction reduction_;
};

// An error that the engine gave, as TensorFlow's.
absl::Status EngineStatus(int code, std::string_view message);

// Tensors as the engine takes them; in a request until it is submitted.
class EngineTensors {
 public:
  // `outputs`: where each result goes; null where it is allocated later.
  EngineTensors(const std::vector<tensorflow::Tensor>& inputs,
                const std::vector<void*>& outputs);

  void AddTo(khvd_request* request) const;

 private:
  std::vector<absl::InlinedVector<int64_t, 4>> shapes_;
  std::vector<khvd_tensor> tensors_;
};

// One run of a kernel, from ComputeAsync to TensorFlow's continuation.
//
// On a GPU that continuation comes when the collective is enqueued: what it puts on the
// kernel's stream runs behind the collective, also what gets the buffers next.
//
// Cancellation is left aside on purpose: what was submitted belongs to the peers too,
// and ends when they have submitted theirs, or with an error when one of them has died.
// Until then TensorFlow keeps the op, and the buffers that the engine works on.
class Submission {
 public:
  Submission(tensorflow::OpKernelContext* ctx,
             tensorflow::AsyncOpKernel::DoneCallback done)
      : ctx_(ctx), done_(std::move(done)) {}
  virtual ~Submission() = default;
  Submission(const Submission&) = delete;
  Submission& operator=(const Submission&) = delete;

  // Adds a tensor whose result goes into `output`, which is allocated and may share
  // `input`'s buffer; null when the result is allocated later, by Allocate().
  void Add(const tensorflow::Tensor& input, tensorflow::Tensor* output);
  // Adds the op's input of this number, whose result is its output of this number, of
  // the same shape.
  absl::Status AddOfSameShape(int index);

  // Hands the request to the engine, with the tensors added so far. `submission` lives
  // until the engine has ended it; if the engine refuses, the op fails at once.
  static void Submit(std::unique_ptr<Submission> submission, khvd_request request);

 protected:
  // Where results are allocated later: memory for that of a tensor, or an error. Called
  // for one tensor after the other.
  virtual absl::StatusOr<void*> Allocate(int32_t tensor, const int64_t* first_dims,
                                         int32_t count);

  tensorflow::OpKernelContext* ctx() const { return ctx_; }
  const tensorflow::Tensor& input(int index) const { return inputs_[index]; }

 private:
  static void Ended(void* context, int code, const char* message);
  static void* AllocateResult(void* context, int32_t tensor, const int64_t* first_dims,
                              int32_t count);

  tensorflow::OpKernelContext* const ctx_;
  tensorflow::AsyncOpKernel::DoneCallback done_;
  std::vector<tensorflow::Tensor> inputs_;
  std::vector<void*> outputs_;
  const char* name_ = nullptr;  // the kernel's, which outlives its runs
  absl::Status allocation_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_KERNELS_SUBMIT_H_
