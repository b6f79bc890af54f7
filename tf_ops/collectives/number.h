// Numbers of the element types, and how two of them are reduced.
//
// All of it is inlined into loops that are compiled for several instruction sets, and
// written without branches, so that the compiler turns the loops into vector code.
#ifndef KERAS_HVD_TF_OPS_COLLECTIVES_NUMBER_H_
#define KERAS_HVD_TF_OPS_COLLECTIVES_NUMBER_H_

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "tf_ops/collectives/processor.h"

namespace keras_hvd {

struct Float16 {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

KHVD_INLINE uint32_t Bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

KHVD_INLINE float FromBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

KHVD_INLINE float Widen(Bfloat16 value) {
  return FromBits(static_cast<uint32_t>(value.bits) << 16);
}

// Without branches, so that the compiler turns the loops over it into vector code.
KHVD_INLINE float Widen(Float16 value) {
  const uint32_t magnitude = (value.bits & 0x7FFFu) << 13;
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  // The exponent's bias is 15 in one and 127 in the other; multiplying by 2^112
  // corrects it and makes subnormal numbers normal as well. Infinity and NaN keep
  // theirs.
  const float normal = FromBits(magnitude) * FromBits((127 + 112) << 23);
  const uint32_t special = (value.bits & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u;
  return FromBits(Bits(normal) | special | sign);
}

KHVD_INLINE void Narrow(float value, Bfloat16* to) {
  const uint32_t bits = Bits(value);
  const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1);
  const uint32_t quiet_nan = bits | 0x00400000u;
  to->bits = static_cast<uint16_t>(
      ((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded) >> 16);
}

// To nearest, ties to even, as the hardware's own conversion.
KHVD_INLINE void Narrow(float value, Float16* to) {
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
KHVD_INLINE T Widen(T value) {
  return value;
}
template <typename T, typename A>
KHVD_INLINE void Narrow(A value, T* to) {
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
  KHVD_INLINE A operator()(A a, A b) const {
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
  KHVD_INLINE A operator()(A a, A b) const {
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
  KHVD_INLINE A operator()(A a, A b) const { return (b < a || b != b) ? b : a; }
};
template <typename A>
struct Larger {
  KHVD_INLINE A operator()(A a, A b) const { return (a < b || b != b) ? b : a; }
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COLLECTIVES_NUMBER_H_
