// The collective ops in programs compiled by XLA.
//
// All are in one file because the compiler's headers take half a minute. An op becomes
// the two custom calls of xla_calls.h. This file decides where they stand among the
// program's other calls:
//
// Starts are chained. XLA starts independent calls in no guaranteed order, and makes
// one wait for another if it gives a buffer to both. In programs that differ between
// ranks (other shapes, other code on one of them), such waits could deadlock: rank 0's
// second start waits for its first done, and rank 1's first start for its second done.
// This cannot happen if all starts have one order. That is the order of compilation,
// which the package's submission.py makes the program's order. A separate computation
// (a branch, a loop's body) has its own chain.
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "tensorflow/compiler/tf2xla/xla_compiler.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "tensorflow/compiler/tf2xla/xla_op_registry.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/statusor.h"
#include "tf_ops/engine/c_api.h"
#include "tf_ops/kernels/attributes.h"
#include "tf_ops/kernels/completion.h"
#include "tf_ops/kernels/job_value.h"
#include "tf_ops/kernels/submitter.h"
#include "tf_ops/kernels/xla_calls.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/layout_util.h"
#include "xla/shape_util.h"

namespace keras_hvd {
namespace {

using Request = CompiledRequest<std::vector<int64_t>>;
using tensorflow::OpKernelConstruction;
using tensorflow::XlaOpKernelContext;

// The token of a computation's last start.
class Chain : public tensorflow::ResourceBase {
 public:
  explicit Chain(xla::XlaOp first) : last(first) {}
  std::string DebugString() const override { return "keras_hvd: the last start"; }

  xla::XlaOp last;
};

// A step's container holds its contents while one computation is compiled.
absl::StatusOr<tensorflow::core::RefCountPtr<Chain>> ChainOf(XlaOpKernelContext* ctx) {
  tensorflow::OpKernelContext* const kernel = ctx->op_kernel_context();
  xla::XlaBuilder* const builder = ctx->builder();
  Chain* chain = nullptr;
  TF_RETURN_IF_ERROR(kernel->step_container()->LookupOrCreate<Chain>(
      kernel->resource_manager(), "keras_hvd/last_start", &chain,
      [builder](Chain** created) {
        *created = new Chain(xla::ConstantR1<uint64_t>(builder, 2, 0));
        return absl::OkStatus();
      }));
  return tensorflow::core::RefCountPtr<Chain>(chain);
}

// Values and their shapes in the engine's layout: the last dimension is contiguous,
// whatever layout XLA would have preferred on this rank.
struct Values {
  void Add(xla::XlaOp value, xla::Shape shape) {
    xla::LayoutUtil::SetToDefaultLayout(&shape);
    values.push_back(value);
    shapes.push_back(std::move(shape));
  }
  void Append(const Values& others) {
    values.insert(values.end(), others.values.begin(), others.values.end());
    shapes.insert(shapes.end(), others.shapes.begin(), others.shapes.end());
  }

  std::vector<xla::XlaOp> values;
  std::vector<xla::Shape> shapes;
};

absl::StatusOr<Values> InputsOf(XlaOpKernelContext* ctx) {
  Values inputs;
  for (int i = 0; i < ctx->num_inputs(); ++i) {
    TF_ASSIGN_OR_RETURN(xla::Shape shape, ctx->InputXlaShape(i));
    if (shape.is_dynamic()) {
      return absl::InvalidArgumentError(absl::StrCat(
          ctx->op_kernel().name(),
          ": a collective under XLA takes tensors whose shape ",
          "is known when the program is compiled; got ", shape.ToString()));
    }
    inputs.Add(ctx->Input(i), std::move(shape));
  }
  return inputs;
}

// The same values as lists, which have only one layout. If a value needs another
// layout, XLA gives each user its own copy and expects a later pass to merge them. But
// start and done must get the same memory.
Values Flat(const Values& inputs) {
  Values flat;
  for (size_t i = 0; i < inputs.values.size(); ++i) {
    const int64_t elements = xla::ShapeUtil::ElementsIn(inputs.shapes[i]);
    flat.Add(xla::Reshape(inputs.values[i], {elements}),
             xla::ShapeUtil::MakeShape(inputs.shapes[i].element_type(), {elements}));
  }
  return flat;
}

// A string of MLIR.
std::string InQuotes(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (absl::ascii_isalnum(c) || absl::StrContains("_-./", c)) {
      quoted.push_back(c);
    } else {
      const auto byte = static_cast<unsigned char>(c);
      absl::StrAppend(&quoted, "\\", absl::Hex(byte, absl::kZeroPad2));
    }
  }
  return quoted + "\"";
}

// A request as an MLIR dictionary, the form of custom calls' attributes.
std::string Attributes(const Request& request) {
  const auto bits = [](double number) {
    uint64_t value;
    std::memcpy(&value, &number, sizeof(value));
    return absl::StrCat("0x", absl::Hex(value, absl::kZeroPad16), " : f64");
  };
  return absl::StrCat(
      "{kind = ", request.kind, " : i32, name = ", InQuotes(request.name),
      ", submitter = ", request.submitter,
      " : i64, process_set = ", request.process_set,
      " : i32, reduce_op = ", request.reduce_op, " : i32, root = ", request.root,
      " : i32, prescale = ", bits(request.prescale),
      ", postscale = ", bits(request.postscale),
      ", labels = ", InQuotes(request.labels), ", rows = array<i64",
      request.rows.empty() ? "" : ": ", absl::StrJoin(request.rows, ", "),
      ">, slot = ", request.slot, " : i32, quantity = ", InQuotes(request.quantity),
      ", value = ", request.value, " : i32, place = ", InQuotes(request.place), "}");
}

// Pairs of a result and the operand whose memory it is written into.
using Aliases =
    std::vector<std::pair<xla::ShapeIndex, std::pair<int64_t, xla::ShapeIndex>>>;

void AddAlias(int64_t result, int64_t operand, Aliases* aliases) {
  aliases->push_back({xla::ShapeIndex{result}, {operand, xla::ShapeIndex{}}});
}

bool IsForGpu(XlaOpKernelContext* ctx) {
  const tensorflow::DeviceType& device = ctx->compiler()->options().device_type;
  return device.type_string() == tensorflow::DEVICE_GPU_XLA_JIT;
}

// On a GPU, custom calls run in the single order that XLA chooses: starts as early as
// possible, dones as late as possible. The CPU runs whatever is ready.
xla::CustomCallSchedule ScheduleOf(XlaOpKernelContext* ctx, const char* target) {
  if (!IsForGpu(ctx)) return xla::CustomCallSchedule::SCHEDULE_NONE;
  return target == kStartTarget ? xla::CustomCallSchedule::SCHEDULE_EARLIEST
                                : xla::CustomCallSchedule::SCHEDULE_LATEST;
}

// Emits a custom call and returns its results.
std::vector<xla::XlaOp> Call(XlaOpKernelContext* ctx, const char* target,
                             const Values& operands,
                             absl::Span<const xla::Shape> results,
                             const std::string& attributes, const Aliases& aliases) {
  const xla::XlaOp call = xla::CustomCallWithLayout(
      ctx->builder(), target, operands.values, xla::ShapeUtil::MakeTupleShape(results),
      operands.shapes, attributes, /*has_side_effect=*/true, aliases,
      /*literal=*/nullptr, ScheduleOf(ctx, target),
      xla::CustomCallApiVersion::API_VERSION_TYPED_FFI);
  std::vector<xla::XlaOp> elements;
  for (size_t i = 0; i < results.size(); ++i) {
    elements.push_back(xla::GetTupleElement(call, static_cast<int64_t>(i)));
  }
  return elements;
}

xla::Shape TokenShape(int64_t requests) {
  return xla::ShapeUtil::MakeShapeWithDenseLayout(xla::U64, {1 + requests}, {0});
}

// A started request.
struct Started {
  int64_t submitter = 0;
  int32_t slot = 1;
  xla::XlaOp token;
  xla::Shape token_shape;
  Values results;  // only its done may use them
  Values inputs;   // must live until its done
};

// The common part of the kernels.
class CollectiveXlaKernel : public tensorflow::XlaOpKernel {
 public:
  explicit CollectiveXlaKernel(OpKernelConstruction* ctx) : XlaOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, StartCompletionThread());
    OP_REQUIRES_OK(ctx, ReadProcessSet(ctx, &process_set_));
    // The gradients of a step have several.
    if (ctx->HasAttr("tensor_name")) {
      OP_REQUIRES_OK(ctx, ReadTensorName(ctx, &tensor_name_));
    }
    if (ctx->HasAttr("reduce_op")) OP_REQUIRES_OK(ctx, ReadReduction(ctx, &reduction_));
  }

 protected:
  Request NewRequest(khvd_kind kind, std::string_view name) const {
    Request request = {};
    request.kind = kind;
    request.name = name;
    request.submitter = static_cast<int64_t>(NextSubmitter());
    request.process_set = process_set_;
    reduction_.AddTo(&request);
    return request;
  }
  Request NewRequest(khvd_kind kind) const { return NewRequest(kind, tensor_name_); }

  int32_t process_set() const { return process_set_; }

 private:
  int32_t process_set_ = 0;
  std::string tensor_name_;
  Reduction reduction_;
};

// Emits a start, the next one in its computation, with a token of its own.
absl::StatusOr<Started> Start(XlaOpKernelContext* ctx, const Request& request,
                              const Values& inputs,
                              absl::Span<const xla::Shape> results) {
  TF_ASSIGN_OR_RETURN(const auto chain, ChainOf(ctx));
  TF_ASSIGN_OR_RETURN(const xla::Shape last, ctx->builder()->GetShape(chain->last));
  Started started;
  started.submitter = request.submitter;
  started.token_shape = TokenShape(1);
  Values operands;
  operands.Add(chain->last, last);
  started.inputs = Flat(inputs);
  operands.Append(started.inputs);
  std::vector<xla::Shape> shapes = {started.token_shape};
  shapes.insert(shapes.end(), results.begin(), results.end());
  const std::vector<xla::XlaOp> elements =
      Call(ctx, kStartTarget, operands, shapes, Attributes(request), {});
  started.token = chain->last = elements[0];
  for (size_t i = 0; i < results.size(); ++i) {
    started.results.Add(elements[1 + i], results[i]);
  }
  return started;
}

// Emits the done of a start. Returns the results, or the token if there are none.
std::vector<xla::XlaOp> Done(XlaOpKernelContext* ctx, const Started& started) {
  Values operands;
  operands.Add(started.token, started.token_shape);
  operands.Append(started.results);
  operands.Append(started.inputs);
  Aliases aliases;
  std::vector<xla::Shape> shapes = started.results.shapes;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    AddAlias(index, 1 + index, &aliases);
  }
  if (shapes.empty()) {
    shapes = {started.token_shape};
    AddAlias(0, 0, &aliases);
  }
  const std::string which =
      IsForGpu(ctx) ? absl::StrCat("{submitter = ", started.submitter, " : i64}")
                    : absl::StrCat("{slot = ", started.slot, " : i32}");
  return Call(ctx, kDoneTarget, operands, shapes, which, aliases);
}

// Makes the program fail in a job in which a number differs from the one it was
// compiled for. Collectives compiled after this also start after it.
absl::Status EmitCheck(XlaOpKernelContext* ctx, const FixedValue& fixed) {
  Request request = {};
  request.kind = kCheck;
  request.name = ctx->op_kernel().name();
  request.submitter = static_cast<int64_t>(NextSubmitter());
  request.process_set = fixed.which.process_set;
  request.quantity = fixed.which.quantity;
  request.value = fixed.value;
  request.place = fixed.place;
  TF_ASSIGN_OR_RETURN(const Started started, Start(ctx, request, {}, {}));
  // On a GPU the start itself fails.
  if (IsForGpu(ctx)) return absl::OkStatus();
  TF_ASSIGN_OR_RETURN(const auto chain, ChainOf(ctx));
  chain->last = Done(ctx, started)[0];
  return absl::OkStatus();
}

// A number of the job as the program gets it: as a constant, with a check.
absl::StatusOr<int32_t> Fix(XlaOpKernelContext* ctx, const JobValue& which) {
  TF_ASSIGN_OR_RETURN(const int32_t value, ValueOf(which));
  TF_RETURN_IF_ERROR(EmitCheck(ctx, {which, value, PlaceInJob()}));
  return value;
}

// Emits a whole collective, whose results are the op's first outputs.
void CompileWhole(XlaOpKernelContext* ctx, const Request& request, const Values& inputs,
                  absl::Span<const xla::Shape> results) {
  OP_REQUIRES_VALUE(const Started started, ctx, Start(ctx, request, inputs, results));
  int output = 0;
  for (const xla::XlaOp result : Done(ctx, started)) ctx->SetOutput(output++, result);
}

// The same, with results that have the shapes of its inputs.
void CompileUnchanged(XlaOpKernelContext* ctx, const Request& request) {
  OP_REQUIRES_VALUE(const Values inputs, ctx, InputsOf(ctx));
  CompileWhole(ctx, request, inputs, inputs.shapes);
}

class AllreduceXlaKernel : public CollectiveXlaKernel {
 public:
  explicit AllreduceXlaKernel(OpKernelConstruction* ctx) : CollectiveXlaKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("labels", &labels_));
  }

  void Compile(XlaOpKernelContext* ctx) override {
    CompileUnchanged(ctx, NewAllreduce());
  }

 protected:
  Request NewAllreduce() const {
    Request request = NewRequest(KHVD_ALLREDUCE);
    request.labels = labels_;
    return request;
  }

 private:
  std::string labels_;
};

// For a function that was first traced to run by itself: the handle has all results.
class StartXlaKernel : public AllreduceXlaKernel {
 public:
  using AllreduceXlaKernel::AllreduceXlaKernel;

  void Compile(XlaOpKernelContext* ctx) override {
    OP_REQUIRES_VALUE(const Values inputs, ctx, InputsOf(ctx));
    OP_REQUIRES_VALUE(const Started started, ctx,
                      Start(ctx, NewAllreduce(), inputs, inputs.shapes));
    ctx->SetTensorListOutput(0, xla::Tuple(ctx->builder(), Done(ctx, started)));
  }
};

class DoneXlaKernel : public tensorflow::XlaOpKernel {
 public:
  explicit DoneXlaKernel(OpKernelConstruction* ctx) : XlaOpKernel(ctx) {}

  void Compile(XlaOpKernelContext* ctx) override {
    int output = 0;
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      const xla::XlaOp results = ctx->Input(i);
      OP_REQUIRES_VALUE(const xla::Shape shape, ctx, ctx->builder()->GetShape(results));
      for (int64_t j = 0; j < xla::ShapeUtil::TupleElementCount(shape); ++j) {
        ctx->SetOutput(output++, xla::GetTupleElement(results, j));
      }
    }
  }
};

class BroadcastXlaKernel : public CollectiveXlaKernel {
 public:
  explicit BroadcastXlaKernel(OpKernelConstruction* ctx) : CollectiveXlaKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("root_rank", &root_rank_));
  }

  void Compile(XlaOpKernelContext* ctx) override {
    Request request = NewRequest(KHVD_BROADCAST);
    request.root = root_rank_;
    CompileUnchanged(ctx, request);
  }

 private:
  int32_t root_rank_ = 0;
};

// The first dimensions of tensors that are joined or split along them.
absl::Status ReadRows(const Values& inputs, std::string_view does,
                      std::vector<int64_t>* rows) {
  for (const xla::Shape& shape : inputs.shapes) {
    TF_RETURN_IF_ERROR(RequireRows(static_cast<int>(shape.dimensions().size()), does));
    rows->push_back(shape.dimensions(0));
  }
  return absl::OkStatus();
}

class AllgatherXlaKernel : public CollectiveXlaKernel {
 public:
  using CollectiveXlaKernel::CollectiveXlaKernel;

  void Compile(XlaOpKernelContext* ctx) override {
    OP_REQUIRES_VALUE(const int64_t size, ctx, Fix(ctx, {"size", process_set()}));
    OP_REQUIRES_VALUE(const Values inputs, ctx, InputsOf(ctx));
    Request request = NewRequest(KHVD_ALLGATHER);
    OP_REQUIRES_OK(ctx, ReadRows(inputs, "allgather joins tensors", &request.rows));
    std::vector<xla::Shape> gathered = inputs.shapes;
    for (xla::Shape& shape : gathered) {
      shape.set_dimensions(0, shape.dimensions(0) * size);
    }
    CompileWhole(ctx, request, inputs, gathered);
    if (!ctx->status().ok()) return;

    // If ranks differ in it, the request fails: see xla_calls.cc.
    const int count = ctx->num_inputs();
    tensorflow::Tensor first_dims(tensorflow::DT_INT64,
                                  tensorflow::TensorShape({count, size}));
    for (int i = 0; i < count; ++i) {
      for (int64_t rank = 0; rank < size; ++rank) {
        first_dims.matrix<int64_t>()(i, rank) = request.rows[i];
      }
    }
    ctx->SetConstantOutput(count, first_dims);
  }
};

class AlltoallXlaKernel : public CollectiveXlaKernel {
 public:
  explicit AlltoallXlaKernel(OpKernelConstruction* ctx) : CollectiveXlaKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("even", &even_));
  }

  // The received tensor has the shape of the given one. If other ranks give something
  // else, the request fails: see xla_calls.cc.
  void Compile(XlaOpKernelContext* ctx) override {
    OP_REQUIRES_VALUE(const int64_t size, ctx, Fix(ctx, {"size", process_set()}));
    OP_REQUIRES_VALUE(Values inputs, ctx, InputsOf(ctx));
    if (even_) {
      inputs.values.pop_back();
      inputs.shapes.pop_back();
    }
    Request request = NewRequest(KHVD_ALLTOALL);
    OP_REQUIRES_OK(ctx, ReadRows(inputs, "alltoall splits tensors", &request.rows));
    request.rows.resize(1);
    const xla::Shape received_splits =
        xla::ShapeUtil::MakeShapeWithDenseLayout(xla::S64, {size}, {0});
    CompileWhole(ctx, request, inputs, {inputs.shapes[0], received_splits});
  }

 private:
  bool even_ = false;
};

class ReducescatterXlaKernel : public CollectiveXlaKernel {
 public:
  using CollectiveXlaKernel::CollectiveXlaKernel;

  void Compile(XlaOpKernelContext* ctx) override {
    OP_REQUIRES_VALUE(const Values inputs, ctx, InputsOf(ctx));
    Request request = NewRequest(KHVD_REDUCESCATTER);
    OP_REQUIRES_OK(ctx,
                   ReadRows(inputs, "reducescatter splits tensors", &request.rows));
    for (const char* const quantity : {"size", "rank"}) {
      OP_REQUIRES_OK(ctx, Fix(ctx, {quantity, process_set()}).status());
    }
    std::vector<xla::Shape> scattered = inputs.shapes;
    for (xla::Shape& shape : scattered) {
      shape.set_dimensions(0, khvd_scattered_rows(process_set(), shape.dimensions(0)));
    }
    CompileWhole(ctx, request, inputs, scattered);
  }
};

class BarrierXlaKernel : public CollectiveXlaKernel {
 public:
  using CollectiveXlaKernel::CollectiveXlaKernel;

  void Compile(XlaOpKernelContext* ctx) override {
    OP_REQUIRES_VALUE(const Started started, ctx,
                      Start(ctx, NewRequest(KHVD_BARRIER), {}, {}));
    // A collective compiled after it, such as the next barrier, also starts after it.
    OP_REQUIRES_VALUE(const auto chain, ctx, ChainOf(ctx));
    chain->last = Done(ctx, started)[0];
  }
};

class GradientsXlaKernel : public CollectiveXlaKernel {
 public:
  explicit GradientsXlaKernel(OpKernelConstruction* ctx) : CollectiveXlaKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadBuckets(ctx, &buckets_));
  }

  // Backprop must not wait for a bucket in any way. So nothing between the first start
  // and the last needs memory that XLA could first have given to something else, making
  // the start wait: results overwrite the gradients, and one token goes through all
  // starts. No done comes before the last start, because XLA would give the bucket's
  // memory to the next layers once it is ready.
  void Compile(XlaOpKernelContext* ctx) override {
    OP_REQUIRES_VALUE(const Values inputs, ctx, InputsOf(ctx));
    OP_REQUIRES_VALUE(const auto chain, ctx, ChainOf(ctx));
    const auto count = static_cast<int64_t>(buckets_.size());
    xla::XlaOp token =
        xla::ConcatInDim(ctx->builder(),
                         {xla::SliceInDim(chain->last, 0, 1, 1, 0),
                          xla::ConstantR1<uint64_t>(ctx->builder(), count, 0)},
                         0);
    std::vector<Started> started;
    int64_t first = 0;
    for (int64_t i = 0; i < count; ++i) {
      started.push_back(StartBucket(ctx, token, inputs, first, i));
      token = started.back().token;
      first += buckets_[i].size;
    }
    chain->last = token;
    int output = 0;
    for (Started& bucket : started) {
      bucket.token = token;
      for (const xla::XlaOp result : Done(ctx, bucket))
        ctx->SetOutput(output++, result);
    }
  }

 private:
  Started StartBucket(XlaOpKernelContext* ctx, xla::XlaOp token, const Values& inputs,
                      int64_t first, int64_t index) const {
    const Bucket& bucket = buckets_[index];
    Request request = NewRequest(KHVD_ALLREDUCE, bucket.name);
    request.labels = bucket.labels;
    request.slot = static_cast<int32_t>(1 + index);
    Started started;
    started.submitter = request.submitter;
    started.slot = request.slot;
    started.token_shape = TokenShape(static_cast<int64_t>(buckets_.size()));
    Values operands;
    operands.Add(token, started.token_shape);
    Aliases in_place;
    AddAlias(0, 0, &in_place);
    for (int64_t i = 0; i < bucket.size; ++i) {
      operands.Add(inputs.values[first + i], inputs.shapes[first + i]);
      AddAlias(1 + i, 1 + i, &in_place);
    }
    const std::vector<xla::XlaOp> elements = Call(
        ctx, kStartTarget, operands, operands.shapes, Attributes(request), in_place);
    started.token = elements[0];
    for (size_t i = 1; i < elements.size(); ++i) {
      started.results.Add(elements[i], operands.shapes[i]);
    }
    return started;
  }

  std::vector<Bucket> buckets_;
};

// A constant, so that shapes can depend on it.
class JobValueXlaKernel : public tensorflow::XlaOpKernel {
 public:
  explicit JobValueXlaKernel(OpKernelConstruction* ctx) : XlaOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadJobValue(ctx, &value_));
  }

  void Compile(XlaOpKernelContext* ctx) override {
    OP_REQUIRES_VALUE(const int32_t value, ctx, Fix(ctx, value_));
    tensorflow::Tensor constant(tensorflow::DT_INT32, tensorflow::TensorShape({}));
    constant.scalar<int32_t>()() = value;
    ctx->SetConstantOutput(0, constant);
  }

 private:
  JobValue value_;
};

class SameJobValueXlaKernel : public tensorflow::XlaOpKernel {
 public:
  explicit SameJobValueXlaKernel(OpKernelConstruction* ctx) : XlaOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadFixedValue(ctx, &fixed_));
  }

  void Compile(XlaOpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, EmitCheck(ctx, fixed_));
  }

 private:
  FixedValue fixed_;
};

// A check within a program would hold up gradients until backprop has ended.
class RequireUnchangedXlaKernel : public tensorflow::XlaOpKernel {
 public:
  using tensorflow::XlaOpKernel::XlaOpKernel;

  void Compile(XlaOpKernelContext*) override {}
};

// A GPU's stream runs on after a failure in any case.
class WholeStepXlaKernel : public tensorflow::XlaOpKernel {
 public:
  using tensorflow::XlaOpKernel::XlaOpKernel;

  void Compile(XlaOpKernelContext* ctx) override {
    OP_REQUIRES_VALUE(const Values inputs, ctx, InputsOf(ctx));
    std::vector<xla::XlaOp> outputs = inputs.values;
    if (IsForGpu(ctx)) {
      outputs.push_back(xla::ConstantR0<int32_t>(ctx->builder(), 0));
    } else {
      std::vector<xla::Shape> shapes = inputs.shapes;
      shapes.push_back(xla::ShapeUtil::MakeShape(xla::S32, {}));
      Aliases aliases;
      for (int i = 0; i < ctx->num_inputs(); ++i) AddAlias(i, i, &aliases);
      outputs = Call(ctx, kWholeStepTarget, inputs, shapes, "", aliases);
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      ctx->SetOutput(static_cast<int>(i), outputs[i]);
    }
  }
};

// REGISTER_XLA_OP works only until TensorFlow compiles its first program, but this
// library is loaded when the first collective is used.
#define KERAS_HVD_REGISTER_XLA(OP, KERNEL)                                          \
  REGISTER_KERNEL_BUILDER(Name(OP).Device(tensorflow::DEVICE_CPU_XLA_JIT), KERNEL); \
  REGISTER_KERNEL_BUILDER(Name(OP).Device(tensorflow::DEVICE_GPU_XLA_JIT), KERNEL)

KERAS_HVD_REGISTER_XLA("KerasHvdAllgather", AllgatherXlaKernel);
KERAS_HVD_REGISTER_XLA("KerasHvdAllreduce", AllreduceXlaKernel);
KERAS_HVD_REGISTER_XLA("KerasHvdAlltoall", AlltoallXlaKernel);
KERAS_HVD_REGISTER_XLA("KerasHvdBarrier", BarrierXlaKernel);
KERAS_HVD_REGISTER_XLA("KerasHvdBroadcast", BroadcastXlaKernel);
KERAS_HVD_REGISTER_XLA("KerasHvdDone", DoneXlaKernel);
KERAS_HVD_REGISTER_XLA("KerasHvdGradients", GradientsXlaKernel);
KERAS_HVD_REGISTER_XLA("KerasHvdJobValue", JobValueXlaKernel);
KERAS_HVD_REGISTER_XLA("KerasHvdReducescatter", ReducescatterXlaKernel);
KERAS_HVD_REGISTER_XLA("KerasHvdRequireUnchanged", RequireUnchangedXlaKernel);
KERAS_HVD_REGISTER_XLA("KerasHvdSameJobValue", SameJobValueXlaKernel);
KERAS_HVD_REGISTER_XLA("KerasHvdStart", StartXlaKernel);
KERAS_HVD_REGISTER_XLA("KerasHvdWholeStep", WholeStepXlaKernel);

}  // namespace
}  // namespace keras_hvd
