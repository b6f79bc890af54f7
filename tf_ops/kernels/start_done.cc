// KerasHvdStart and KerasHvdDone: an allreduce in two ops, one start for each bucket
// and one done for all.
//
// These are for the gradients of a step on a GPU. One op per bucket would make
// backprop's stream, and so the rest of backprop, wait for each collective. Instead, a
// start hands its bucket over and lets the stream continue. A single done after all
// starts makes the stream wait for their collectives.
//
// A handle passes from start to done and keeps inputs and results alive. Nobody else
// gets the results before they are ready. No tensor leads from start to done, because
// TensorFlow might copy it to another device in between.
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_tensor_data.h"
#include "tf_ops/kernels/completion.h"
#include "tf_ops/kernels/register.h"
#include "tf_ops/kernels/request_end.h"
#include "tf_ops/kernels/submit.h"
#include "tf_ops/kernels/trace.h"

namespace keras_hvd {
namespace {

using tensorflow::DataType;
using tensorflow::Variant;
using tensorflow::shape_inference::ShapeAndType;

REGISTER_OP("KerasHvdStart")
    .Input("tensors: T")
    .Output("handle: variant")
    .Attr("T: list(type) >= 1")
    .Attr("tensor_name: string")
    .Attr("reduce_op: int")
    .Attr("prescale: string = '1'")
    .Attr("postscale: string = '1'")
    .Attr("process_set: int = 0")
    .Attr("labels: string = ''")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      std::vector<DataType> types;
      TF_RETURN_IF_ERROR(c->GetAttr("T", &types));
      std::vector<ShapeAndType> results;
      for (int i = 0; i < c->num_inputs(); ++i) {
        results.emplace_back(c->input(i), types[i]);
      }
      c->set_output(0, c->Scalar());
      c->set_output_handle_shapes_and_types(0, results);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Starts what KerasHvdAllreduce does, and does not wait for it.

tensors: one tensor, or several that form a group.
handle: what KerasHvdDone gets the results by.
tensor_name: matches this rank's request to the other ranks'.
reduce_op: a khvd_reduce_op.
prescale: multiplies each rank's elements before the reduction.
postscale: multiplies the result.
process_set: the ranks that take part.
labels: those of KerasHvdAllreduce.
)doc");

REGISTER_OP("KerasHvdDone")
    .Input("handles: N * variant")
    .Output("reduced: T")
    .Attr("N: int >= 1")
    .Attr("T: list(type) >= 1")
    .Attr("sizes: list(int) >= 1")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      int output = 0;
      for (int i = 0; i < c->num_inputs(); ++i) {
        const std::vector<ShapeAndType>* results = c->input_handle_shapes_and_types(i);
        if (results == nullptr) break;
        for (const ShapeAndType& result : *results) {
          if (output < c->num_outputs()) c->set_output(output++, result.shape);
        }
      }
      while (output < c->num_outputs()) c->set_output(output++, c->UnknownShape());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Ends when all the allreduces have ended, or with an error of the first that has one.

handles: those of KerasHvdStart, which no other op gets.
reduced: the results of all, in the order of the handles.
sizes: how many results each handle has; its gradient alone asks.
)doc");

// An allreduce between its start and its done.
class Started {
 public:
  explicit Started(std::string_view name) : name_(name) {}

  // Adds the op's input with this index. The result may reuse its buffer.
  absl::Status Add(OpKernelContext* ctx, int index);
  // Hands the request to the engine, which then uses this until the request has ended.
  absl::Status Submit(OpKernelContext* ctx, khvd_request request);

  RequestEnd& end() { return end_; }
  // Call it once, after the request has ended. Returns the results, which are ready for
  // whatever the stream runs next.
  absl::StatusOr<std::vector<Tensor>> Finish();

 private:
  static void Ended(void* context, int code, const char* message);

  const std::string name_;
  std::vector<Tensor> inputs_;
  std::vector<Tensor> results_;
  // Last member, so it is destroyed first: the buffers may be in use until then.
  RequestEnd end_;
};

absl::Status Started::Add(OpKernelContext* ctx, int index) {
  const Tensor& input = ctx->input(index);
  Tensor result;
  TF_RETURN_IF_ERROR(
      ctx->forward_input_or_allocate_temp({index}, input.dtype(), input.shape(),
                                          tensorflow::AllocatorAttributes(), &result));
  inputs_.push_back(input);
  results_.push_back(std::move(result));
  return absl::OkStatus();
}

absl::Status Started::Submit(OpKernelContext* ctx, khvd_request request) {
  std::vector<void*> outputs;
  for (const Tensor& result : results_) outputs.push_back(result.data());
  const EngineTensors tensors(inputs_, outputs);
  tensors.AddTo(&request);
  AddGpuStream(ctx, &request);
  end_.AddTo(&request);
  request.done = &Started::Ended;
  request.context = this;
  TraceStart(name_);
  const int code = khvd_submit(&request);
  return code == KHVD_OK ? absl::OkStatus() : EngineStatus(code, khvd_last_error());
}

void Started::Ended(void* context, int code, const char* message) {
  auto* const started = static_cast<Started*>(context);
  TraceEnd(started->name_);
  std::function<void()> then = started->end_.Set(code, message);
  if (then) CompleteLater(std::move(then));
}

absl::StatusOr<std::vector<Tensor>> Started::Finish() {
  end_.Await();
  inputs_.clear();
  std::vector<Tensor> results = std::exchange(results_, {});
  if (end_.code() != KHVD_OK) return EngineStatus(end_.code(), end_.message());
  if (!results.empty()) return results;
  return absl::FailedPreconditionError(absl::StrCat(
      "'", name_, "': its KerasHvdDone has already run and returned its results"));
}

// The content of a handle. TensorFlow may copy it but must not serialize it.
struct Handle {
  std::shared_ptr<Started> started;

  std::string TypeName() const { return "keras_hvd::Handle"; }
  std::string DebugString() const { return TypeName(); }
  void Encode(tensorflow::VariantTensorData* data) const {
    data->set_type_name(TypeName());
  }
  bool Decode(const tensorflow::VariantTensorData&) { return false; }
};

class StartKernel : public ReductionKernel {
 public:
  explicit StartKernel(OpKernelConstruction* ctx) : ReductionKernel(ctx) {}

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    ctx->SetStatus(Start(ctx));
    done();
  }

 private:
  absl::Status Start(OpKernelContext* ctx) const {
    const khvd_request request = Request(KHVD_ALLREDUCE, ctx);
    auto started = std::make_unique<Started>(request.name);
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      TF_RETURN_IF_ERROR(started->Add(ctx, i));
    }
    Tensor* handle = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &handle));
    TF_RETURN_IF_ERROR(started->Submit(ctx, request));
    handle->scalar<Variant>()() = Handle{{started.release(), DeleteOnceEnded()}};
    return absl::OkStatus();
  }
};

using AllStarted = std::vector<std::shared_ptr<Started>>;

class DoneKernel : public tensorflow::AsyncOpKernel {
 public:
  explicit DoneKernel(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {}

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto all = std::make_shared<AllStarted>();
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      const Handle* const handle = ctx->input(i).scalar<Variant>()().get<Handle>();
      OP_REQUIRES_ASYNC(ctx, handle != nullptr,
                        absl::InvalidArgumentError(absl::StrCat(
                            "input ", i, " of ", name(), " is not a KerasHvdStart's")),
                        done);
      all->push_back(handle->started);
    }
    // All starts have been submitted, so nothing is left to do beside this. A wait that
    // does not end soon continues on another thread: no thread of TensorFlow's may
    // block.
    for (const std::shared_ptr<Started>& each : *all) {
      if (!each->end().Drive()) break;
    }
    auto under_way = std::make_shared<std::atomic<size_t>>(all->size());
    for (const std::shared_ptr<Started>& each : *all) {
      each->end().WhenKnown([ctx, all, done, under_way] {
        if (under_way->fetch_sub(1) > 1) return;
        ctx->SetStatus(Finish(ctx, *all));
        done();
      });
    }
  }

 private:
  // Finishes every one of them, also after an error.
  static absl::Status Finish(OpKernelContext* ctx, const AllStarted& all) {
    absl::Status status;
    int output = 0;
    for (const std::shared_ptr<Started>& each : all) {
      absl::StatusOr<std::vector<Tensor>> results = each->Finish();
      status.Update(results.status());
      if (!status.ok()) continue;
      for (Tensor& result : *results) {
        if (output == ctx->num_outputs() ||
            result.dtype() != ctx->expected_output_dtype(output)) {
          status = absl::InvalidArgumentError(absl::StrCat(
              ctx->op_kernel().name(), " does not have the types of its starts"));
          break;
        }
        ctx->set_output(output++, std::move(result));
      }
    }
    if (status.ok() && output < ctx->num_outputs()) {
      status = absl::InvalidArgumentError(
          absl::StrCat(ctx->op_kernel().name(), " has more results than its starts"));
    }
    return status;
  }
};

KERAS_HVD_REGISTER("KerasHvdStart", StartKernel, .HostMemory("handle"));
KERAS_HVD_REGISTER("KerasHvdDone", DoneKernel, .HostMemory("handles"));

}  // namespace
}  // namespace keras_hvd
