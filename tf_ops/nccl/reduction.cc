#include "tf_ops/nccl/reduction.h"

#include <cmath>
#include <cstring>

#include "tf_ops/collectives/number.h"

namespace keras_hvd::nccl {
namespace {

// The factor for every element before the sum. It rounds once, while the CPU multiplies
// by one scale before the sum and by another after it.
double ScaleOf(const Reduction& reduction, int count) {
  const double scale = reduction.prescale * reduction.postscale;
  return reduction.op == ReduceOp::kAverage ? scale / count : scale;
}

bool IsScaled(const Reduction& reduction) {
  return reduction.prescale != 1 || reduction.postscale != 1;
}

// A scale as a number of a tensor's type, as NCCL reads it.
struct Scale {
  alignas(8) char bytes[8] = {};
  // Whether the type can represent it: as closely as any of its numbers, or exactly if
  // its numbers are so far apart that the rounding would affect all results as much.
  bool fits = true;
};

template <typename T>
Scale ScaleAs(T value, bool fits) {
  Scale scale;
  memcpy(scale.bytes, &value, sizeof(value));
  scale.fits = fits;
  return scale;
}

template <typename T>
Scale Narrowed(double scale) {
  T narrow;
  Narrow(static_cast<float>(scale), &narrow);
  return ScaleAs(narrow, Widen(narrow) == scale);
}

Scale ScaleIn(DataType dtype, double scale) {
  const float single = static_cast<float>(scale);
  switch (dtype) {
    case DataType::kFloat16: return Narrowed<Float16>(scale);
    case DataType::kBfloat16: return Narrowed<Bfloat16>(scale);
    case DataType::kFloat8E5m2: return Narrowed<Float8E5m2>(scale);
    case DataType::kFloat8E4m3fn: return Narrowed<Float8E4m3fn>(scale);
    case DataType::kFloat32: return ScaleAs(single, std::isnormal(single));
    default: return ScaleAs(scale, true);
  }
}

bool CanScale(const Reduction& reduction, DataType dtype, int count) {
  if (!IsFloating(dtype)) return false;
  const double scale = ScaleOf(reduction, count);
  // An out-of-range product of the two scales says nothing about their effect.
  return std::isnormal(scale) && ScaleIn(dtype, scale).fits;
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
    case ReduceOp::kProduct: return !IsScaled(reduction);
    case ReduceOp::kAdasum: break;
  }
  return false;
}

Op BuiltIn(ReduceOp op) {
  switch (op) {
    case ReduceOp::kAverage: return kAverage;
    case ReduceOp::kMin: return kMin;
    case ReduceOp::kMax: return kMax;
    case ReduceOp::kProduct: return kProduct;
    case ReduceOp::kSum:
    case ReduceOp::kAdasum: break;
  }
  return kSum;
}

}  // namespace

Type TypeOf(DataType dtype) {
  switch (dtype) {
    case DataType::kInt8: return Type::kInt8;
    case DataType::kInt32: return Type::kInt32;
    case DataType::kInt64: return Type::kInt64;
    case DataType::kFloat16: return Type::kFloat16;
    case DataType::kBfloat16: return Type::kBfloat16;
    case DataType::kFloat32: return Type::kFloat32;
    case DataType::kFloat64: return Type::kFloat64;
    case DataType::kUint32: return Type::kUint32;
    case DataType::kUint64: return Type::kUint64;
    case DataType::kFloat8E5m2: return Type::kFloat8e5m2;
    case DataType::kFloat8E4m3fn: return Type::kFloat8e4m3;
    case DataType::kUint8:
    // Truth values are 0 and 1, so And is the minimum and Or the maximum.
    case DataType::kBool:
    // These types are only moved, as bytes.
    case DataType::kInt16:
    case DataType::kUint16:
    case DataType::kComplex64:
    case DataType::kComplex128: break;
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

Status ScopedOps::Add(DataType dtype, Communicator* communicator) {
  std::optional<Op>& op = ops_[static_cast<int>(dtype)];
  if (op.has_value()) return Status::Ok();
  if (!HasReduction(reduction_, dtype, communicator->count())) {
    return Status::Internal("NCCL has no such reduction: " +
                            std::string(Name(reduction_.op)) + " of " + Name(dtype));
  }
  const double factor = ScaleOf(reduction_, communicator->count());
  if (!IsScaled(reduction_) || factor == 1) {
    op = IsScaled(reduction_) ? kSum : BuiltIn(reduction_.op);
    return Status::Ok();
  }
  const Library& library = communicator->library();
  Scale scale = ScaleIn(dtype, factor);
  const Result result =
      library->make_scaled_sum(&op.emplace(), scale.bytes, TypeOf(dtype),
                               Residence::kHostImmediate, communicator->comm());
  KHVD_RETURN_IF_ERROR(
      library.Check(result, "ncclRedOpCreatePreMulSum", communicator->comm()));
  communicator_ = communicator;
  made_.push_back(*op);
  return Status::Ok();
}

// A failed communicator takes its ops with it.
ScopedOps::~ScopedOps() {
  if (communicator_ == nullptr || !communicator_->usable()) return;
  for (const Op op : made_)
    communicator_->library()->destroy_op(op, communicator_->comm());
}

}  // namespace keras_hvd::nccl
