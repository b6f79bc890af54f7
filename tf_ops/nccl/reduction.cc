#include "tf_ops/nccl/reduction.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "tf_ops/collectives/number.h"

namespace keras_hvd::nccl {
namespace {

// A number of a tensor's type, as NCCL reads it.
struct Number {
  alignas(8) char bytes[8];
};

template <typename T>
Number NumberOf(T value) {
  Number number = {};
  memcpy(number.bytes, &value, sizeof(value));
  return number;
}

// The factor for every element before the sum. It rounds once, while the CPU multiplies
// by one scale before the sum and by another after it.
double ScaleOf(const Reduction& reduction, int count) {
  const double scale = reduction.prescale * reduction.postscale;
  return reduction.op == ReduceOp::kAverage ? scale / count : scale;
}

bool IsScaled(const Reduction& reduction) {
  return reduction.prescale != 1 || reduction.postscale != 1;
}

template <typename T>
bool IsNumberOf(double scale) {
  T narrow;
  Narrow(static_cast<float>(scale), &narrow);
  return Widen(narrow) == scale;
}

// Whether the type can represent the scale: as closely as any of its numbers, or
// exactly if its numbers are so far apart that the rounding would affect all results as
// much.
bool HasScale(DataType dtype, double scale) {
  switch (dtype) {
    case DataType::kFloat16:
      return IsNumberOf<Float16>(scale);
    case DataType::kBfloat16:
      return IsNumberOf<Bfloat16>(scale);
    case DataType::kFloat8E5m2:
      return IsNumberOf<Float8E5m2>(scale);
    case DataType::kFloat8E4m3fn:
      return IsNumberOf<Float8E4m3fn>(scale);
    case DataType::kFloat32:
      return std::isnormal(static_cast<float>(scale));
    default:
      return true;
  }
}

template <typename T>
Number NarrowNumber(double scale) {
  T narrow;
  Narrow(static_cast<float>(scale), &narrow);
  return NumberOf(narrow);
}

Number ScaleIn(DataType dtype, double scale) {
  switch (dtype) {
    case DataType::kFloat16:
      return NarrowNumber<Float16>(scale);
    case DataType::kBfloat16:
      return NarrowNumber<Bfloat16>(scale);
    case DataType::kFloat8E5m2:
      return NarrowNumber<Float8E5m2>(scale);
    case DataType::kFloat8E4m3fn:
      return NarrowNumber<Float8E4m3fn>(scale);
    case DataType::kFloat32:
      return NumberOf(static_cast<float>(scale));
    default:
      return NumberOf(scale);
  }
}

bool CanScale(const Reduction& reduction, DataType dtype, int count) {
  if (!IsFloating(dtype)) return false;
  const double scale = ScaleOf(reduction, count);
  // An out-of-range product of the two scales says nothing about their effect.
  return std::isnormal(scale) && HasScale(dtype, scale);
}

bool HasReduction(const Reduction& reduction, DataType dtype, int count) {
  if (!Supports(reduction, dtype)) return false;
  switch (reduction.op) {
    case ReduceOp::kSum:
      return !IsScaled(reduction) || CanScale(reduction, dtype, count);
    case ReduceOp::kAverage:
      if (!IsFloating(dtype)) return false;
      if (IsFloat8(dtype)) return CanScale(reduction, dtype, count);
      return !IsScaled(reduction) || CanScale(reduction, dtype, count);
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      // NCCL ignores NaNs, as if no member had one.
      return !IsScaled(reduction) && !IsFloating(dtype);
    case ReduceOp::kProduct:
      return !IsScaled(reduction);
    case ReduceOp::kAdasum:
      break;
  }
  return false;
}

Op BuiltIn(ReduceOp op) {
  switch (op) {
    case ReduceOp::kAverage:
      return kAverage;
    case ReduceOp::kMin:
      return kMin;
    case ReduceOp::kMax:
      return kMax;
    case ReduceOp::kProduct:
      return kProduct;
    case ReduceOp::kSum:
    case ReduceOp::kAdasum:
      break;
  }
  return kSum;
}

}  // namespace

Type TypeOf(DataType dtype) {
  switch (dtype) {
    case DataType::kInt8:
      return Type::kInt8;
    case DataType::kInt32:
      return Type::kInt32;
    case DataType::kInt64:
      return Type::kInt64;
    case DataType::kFloat16:
      return Type::kFloat16;
    case DataType::kBfloat16:
      return Type::kBfloat16;
    case DataType::kFloat32:
      return Type::kFloat32;
    case DataType::kFloat64:
      return Type::kFloat64;
    case DataType::kUint32:
      return Type::kUint32;
    case DataType::kUint64:
      return Type::kUint64;
    case DataType::kFloat8E5m2:
      return Type::kFloat8e5m2;
    case DataType::kFloat8E4m3fn:
      return Type::kFloat8e4m3;
    case DataType::kUint8:
    // Truth values are 0 and 1, so And is the minimum and Or the maximum.
    case DataType::kBool:
    // These types are only moved, as bytes.
    case DataType::kInt16:
    case DataType::kUint16:
    case DataType::kComplex64:
    case DataType::kComplex128:
      break;
  }
  return Type::kUint8;
}

bool CanReduce(const Reduction& reduction, DataType dtype, int count,
               const Capabilities& capabilities) {
  if (IsFloat8(dtype) && (capabilities.version < kFloat8Version ||
                          capabilities.compute_capability < kFloat8Capability)) {
    return false;
  }
  return HasReduction(reduction, dtype, count);
}

Status ScopedOp::Make(const Reduction& reduction, DataType dtype,
                      Communicator* communicator, ScopedOp* op) {
  *op = ScopedOp();
  if (!HasReduction(reduction, dtype, communicator->count())) {
    return Status::Internal("NCCL has no such reduction: " +
                            std::string(Name(reduction.op)) + " of " + Name(dtype));
  }
  if (!IsScaled(reduction)) {
    op->op_ = BuiltIn(reduction.op);
    return Status::Ok();
  }
  const double scale = ScaleOf(reduction, communicator->count());
  if (scale == 1) return Status::Ok();
  const Library& library = communicator->library();
  Number number = ScaleIn(dtype, scale);
  const Result result =
      library->make_scaled_sum(&op->op_, number.bytes, TypeOf(dtype),
                               Residence::kHostImmediate, communicator->comm());
  Status status =
      library.Check(result, "ncclRedOpCreatePreMulSum", communicator->comm());
  if (status.ok()) op->communicator_ = communicator;
  return status;
}

// A failed communicator takes its ops with it.
ScopedOp::~ScopedOp() {
  if (communicator_ == nullptr || !communicator_->usable()) return;
  communicator_->library()->destroy_op(op_, communicator_->comm());
}

ScopedOp::ScopedOp(ScopedOp&& other) noexcept { *this = std::move(other); }

ScopedOp& ScopedOp::operator=(ScopedOp&& other) noexcept {
  std::swap(communicator_, other.communicator_);
  std::swap(op_, other.op_);
  return *this;
}

Status ScopedOps::Add(DataType dtype, Communicator* communicator) {
  std::optional<ScopedOp>& op = ops_[static_cast<int>(dtype)];
  if (op.has_value()) return Status::Ok();
  return ScopedOp::Make(reduction_, dtype, communicator, &op.emplace());
}

}  // namespace keras_hvd::nccl
