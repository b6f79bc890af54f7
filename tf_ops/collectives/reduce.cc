// See reduce.h.
#include "tf_ops/collectives/reduce.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

namespace keras_hvd {
namespace {

struct Float16 {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

uint32_t Bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float FromBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float Widen(Bfloat16 value) {
  return FromBits(static_cast<uint32_t>(value.bits) << 16);
}

// Without branches, so that the compiler turns the loops over it into vector code.
inline float Widen(Float16 value) {
  const uint32_t magnitude = (value.bits & 0x7FFFu) << 13;
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  // The exponent's bias is 15 in one and 127 in the other; multiplying by 2^112
  // corrects it and makes subnormal numbers normal as well. Infinity and NaN keep
  // theirs.
  const float normal = FromBits(magnitude) * FromBits((127 + 112) << 23);
  const uint32_t special = (value.bits & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u;
  return FromBits(Bits(normal) | special | sign);
}

inline void Narrow(float value, Bfloat16* to) {
  const uint32_t bits = Bits(value);
  const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1);
  const uint32_t quiet_nan = bits | 0x00400000u;
  to->bits = static_cast<uint16_t>(
      ((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded) >> 16);
}

// To nearest, ties to even, as the hardware's own conversion.
inline void Narrow(float value, Float16* to) {
  const uint32_t sign = (Bits(value) >> 16) & 0x8000u;
  const uint32_t magnitude = Bits(value) & 0x7FFFFFFFu;
  // Normal results: the exponent rebiased, the 13 lost bits rounded.
  const uint32_t normal =
      (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1)) >> 13;
  // Results below 2^-14: adding 0.5 moves the mantissa to where the unit adder rounds
  // it.
  const uint32_t subnormal = Bits(FromBits(magnitude) + 0.5f) - Bits(0.5f);
  uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= (143u << 23) ? 0x7C00u : half;
  half = magnitude > 0x7F800000u ? 0x7E00u | ((magnitude >> 13) & 0x3FFu) : half;
  to->bits = static_cast<uint16_t>(half | sign);
}

template <typename T>
inline T Widen(T value) {
  return value;
}
template <typename T, typename A>
inline void Narrow(A value, T* to) {
  if constexpr (std::is_integral_v<T> && std::is_floating_point_v<A>) {
    // A scaled integer that leaves its type's range stays at the range's end.
    constexpr A lowest = static_cast<A>(std::numeric_limits<T>::lowest());
    constexpr A highest = static_cast<A>(std::numeric_limits<T>::max());
    if (value >= highest) {
      *to = std::numeric_limits<T>::max();
    } else {
      *to = value <= lowest ? std::numeric_limits<T>::lowest() : static_cast<T>(value);
    }
  } else {
    *to = static_cast<T>(value);
  }
}

// What sums are held in. Integers are unsigned in there: they wrap around by
// definition.
template <typename T>
struct Accumulator {
  using Type = T;
};
template <>
struct Accumulator<Float16> {
  using Type = float;
};
template <>
struct Accumulator<Bfloat16> {
  using Type = float;
};

template <typename A>
struct Add {
  A operator()(A a, A b) const {
    if constexpr (std::is_integral_v<A>) {
      using U = std::make_unsigned_t<A>;
      return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
    } else {
      return a + b;
    }
  }
};
template <typename A>
struct Multiply {
  A operator()(A a, A b) const {
    if constexpr (std::is_integral_v<A>) {
      // 64 bits, for 8-bit types would be promoted to a signed int that may overflow.
      return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    } else {
      return a * b;
    }
  }
};
// A NaN of any rank is a NaN of the result, whatever its place.
template <typename A>
struct Smaller {
  A operator()(A a, A b) const { return (b < a || b != b) ? b : a; }
};
template <typename A>
struct Larger {
  A operator()(A a, A b) const { return (a < b || b != b) ? b : a; }
};

// Elements are combined in blocks that stay in the first-level cache.
constexpr int64_t kBlock = 1024;

struct Job {
  const void* const* inputs;
  int count;
  int64_t elements;
  void* result;
  double prescale;
  double postscale;
};

template <typename T, typename A, typename Op>
void Combine(const Job& job) {
  const auto* const* inputs = reinterpret_cast<const T* const*>(job.inputs);
  T* result = static_cast<T*>(job.result);
  const bool scaled = job.prescale != 1 || job.postscale != 1;
  const A prescale = static_cast<A>(job.prescale);
  const A postscale = static_cast<A>(job.postscale);
  A sums[kBlock];
  for (int64_t start = 0; start < job.elements; start += kBlock) {
    const int64_t n = std::min(kBlock, job.elements - start);
    const T* first = inputs[0] + start;
    if (!scaled) {
      for (int64_t i = 0; i < n; ++i) sums[i] = static_cast<A>(Widen(first[i]));
      for (int input = 1; input < job.count; ++input) {
        const T* next = inputs[input] + start;
        for (int64_t i = 0; i < n; ++i) {
          sums[i] = Op()(sums[i], static_cast<A>(Widen(next[i])));
        }
      }
      for (int64_t i = 0; i < n; ++i) Narrow(sums[i], result + start + i);
      continue;
    }
    for (int64_t i = 0; i < n; ++i)
      sums[i] = static_cast<A>(Widen(first[i])) * prescale;
    for (int input = 1; input < job.count; ++input) {
      const T* next = inputs[input] + start;
      for (int64_t i = 0; i < n; ++i) {
        sums[i] =
            Op()(sums[i], static_cast<A>(static_cast<A>(Widen(next[i])) * prescale));
      }
    }
    for (int64_t i = 0; i < n; ++i) Narrow(sums[i] * postscale, result + start + i);
  }
}

template <typename T, typename A>
void CombineWith(ReduceOp op, const Job& job) {
  switch (op) {
    case ReduceOp::kAverage:
    case ReduceOp::kSum:
      return Combine<T, A, Add<A>>(job);
    case ReduceOp::kMin:
      return Combine<T, A, Smaller<A>>(job);
    case ReduceOp::kMax:
      return Combine<T, A, Larger<A>>(job);
    case ReduceOp::kProduct:
      return Combine<T, A, Multiply<A>>(job);
  }
}

template <typename T>
void ReduceFloats(const Reduction& reduction, Job job) {
  if (reduction.op == ReduceOp::kAverage) job.postscale /= job.count;
  CombineWith<T, typename Accumulator<T>::Type>(reduction.op, job);
}

// The average is taken of the exact sum, which may not fit into the type.
template <typename T>
void AverageIntegers(const Job& job) {
  const auto* const* inputs = reinterpret_cast<const T* const*>(job.inputs);
  for (int64_t i = 0; i < job.elements; ++i) {
    __int128 sum = 0;
    for (int input = 0; input < job.count; ++input) sum += inputs[input][i];
    static_cast<T*>(job.result)[i] = static_cast<T>(sum / job.count);
  }
}

template <typename T>
void ReduceIntegers(const Reduction& reduction, Job job) {
  if (job.prescale != 1 || job.postscale != 1) {
    if (reduction.op == ReduceOp::kAverage) job.postscale /= job.count;
    return CombineWith<T, double>(reduction.op, job);
  }
  if (reduction.op == ReduceOp::kAverage) return AverageIntegers<T>(job);
  CombineWith<T, T>(reduction.op, job);
}

}  // namespace

void Reduce(const Reduction& reduction, DataType dtype, const void* const* inputs,
            int count, int64_t elements, void* result) {
  const Job job = {
      inputs, count, elements, result, reduction.prescale, reduction.postscale};
  switch (dtype) {
    case DataType::kUint8:
    // Truth values are 0 and 1, of which And is the smaller and Or the larger.
    case DataType::kBool:
      return ReduceIntegers<uint8_t>(reduction, job);
    case DataType::kInt8:
      return ReduceIntegers<int8_t>(reduction, job);
    case DataType::kInt32:
      return ReduceIntegers<int32_t>(reduction, job);
    case DataType::kInt64:
      return ReduceIntegers<int64_t>(reduction, job);
    case DataType::kFloat16:
      return ReduceFloats<Float16>(reduction, job);
    case DataType::kBfloat16:
      return ReduceFloats<Bfloat16>(reduction, job);
    case DataType::kFloat32:
      return ReduceFloats<float>(reduction, job);
    case DataType::kFloat64:
      return ReduceFloats<double>(reduction, job);
  }
}

bool Supports(const Reduction& reduction, DataType dtype) {
  if (dtype != DataType::kBool) return true;
  const bool sums =
      reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAverage;
  return !sums && reduction.prescale == 1 && reduction.postscale == 1;
}

}  // namespace keras_hvd
