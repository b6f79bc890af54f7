// Reduces the same elements of all ranks to one result.
#pragma once

#include <cstdint>

#include "tf_ops/collectives/copy.h"
#include "tf_ops/collectives/dtype.h"
#include "tf_ops/collectives/processor.h"

namespace keras_hvd {

struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1;   // multiplies every rank's elements
  double postscale = 1;  // multiplies the result

  bool operator==(const Reduction& other) const {
    return op == other.op && prescale == other.prescale && postscale == other.postscale;
  }
};

// `reduction` must be element-wise (not kAdasum).
//
// result[i] = postscale * op(prescale * inputs[0][i], ..., prescale * inputs[n-1][i]).
//
// Elements are combined in the order of `inputs`; 8- and 16-bit floats in float32, with
// one rounding at the end. The bits thus depend only on the inputs. Integer sums wrap
// around like the type; integer averages are exact and rounded towards zero. A scaled
// integer is rounded towards zero both before and after the reduction, and is clamped
// to its type's range. `result` may be one of the inputs. The instruction set affects
// only the time and the payload of NaNs.
void Reduce(const Reduction& reduction, DataType dtype, const void* const* inputs,
            int count, int64_t elements, void* result,
            InstructionSet instructions = BestInstructionSet());

// Writes the same bits to two places in one pass over the inputs. `stores` says how
// each is written. StoreFence() must follow streaming stores. Returns false, with
// nothing done, if there is no such loop: it handles sums and averages of float32 and
// float64, and streams only to multiples of a cache line. `output` may be one of the
// inputs.
bool ReduceToBoth(const Reduction& reduction, DataType dtype, const void* const* inputs,
                  int count, int64_t elements, Stores stores, void* exchange,
                  void* output, InstructionSet instructions = BestInstructionSet());

// Whether `op` with these scales makes sense for the type. bool has no sums; only
// floats have angles between vectors and infinite scales; some types are only moved.
bool Supports(const Reduction& reduction, DataType dtype);

}  // namespace keras_hvd
