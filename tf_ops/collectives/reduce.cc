#include "tf_ops/collectives/reduce.h"

#include <cmath>

#include "tf_ops/collectives/reduce_job.h"

namespace keras_hvd {

void Reduce(const Reduction& reduction, DataType dtype, const void* const* inputs,
            int count, int64_t elements, void* result, InstructionSet instructions) {
  RunLoops(instructions, reduction.op, dtype,
           {inputs, count, elements, result, reduction.prescale, reduction.postscale});
}

bool ReduceToBoth(const Reduction& reduction, DataType dtype, const void* const* inputs,
                  int count, int64_t elements, Stores stores, void* exchange,
                  void* output, InstructionSet instructions) {
  const bool adds =
      reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAverage;
  if (!adds || (dtype != DataType::kFloat32 && dtype != DataType::kFloat64)) {
    return false;
  }
  const auto past_line = [](void* place) {
    return reinterpret_cast<uintptr_t>(place) % kCacheLine;
  };
  if (stores != Stores::kOrdinary && past_line(output) != 0) return false;
  if (stores == Stores::kStreaming && past_line(exchange) != 0) return false;
  TwofoldJob twofold = {
      {inputs, count, elements, output, reduction.prescale, reduction.postscale},
      exchange,
      stores};
  if (reduction.op == ReduceOp::kAverage) twofold.job.postscale /= count;
  RunTwofoldLoops(instructions, dtype, twofold);
  return true;
}

bool Supports(const Reduction& reduction, DataType dtype) {
  if (!IsReduced(dtype)) return false;
  if (reduction.op == ReduceOp::kAdasum) return IsFloating(dtype);
  // Infinity times 0 is NaN, which integer types cannot represent.
  if (IsInteger(dtype)) {
    return std::isfinite(reduction.prescale) && std::isfinite(reduction.postscale);
  }
  if (dtype != DataType::kBool) return true;
  const bool sums =
      reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAverage;
  return !sums && reduction.prescale == 1 && reduction.postscale == 1;
}

}  // namespace keras_hvd
