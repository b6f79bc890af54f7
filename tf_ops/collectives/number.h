// The numbers of each element type, and how two of them are reduced.
//
// All of this is inlined into loops that are compiled for several instruction sets. It
// has no branches, so the compiler turns the loops into vector code.
#pragma once

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
// Like half precision, but with 2 bits of mantissa instead of 10.
struct Float8E5m2 {
  uint8_t bits;
};
// Has no infinities: the largest exponent holds numbers, up to 448, and one NaN.
struct Float8E4m3fn {
  uint8_t bits;
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

// Branch-free, so the compiler turns loops over it into vector code.
KHVD_INLINE float Widen(Float16 value) {
  const uint32_t magnitude = (value.bits & 0x7FFFu) << 13;
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  // The exponent's bias is 15 in one and 127 in the other. Multiplying by 2^112
  // corrects it and normalizes subnormal numbers. Infinity and NaN keep their exponent.
  const float normal = FromBits(magnitude) * FromBits((127 + 112) << 23);
  const uint32_t special = (value.bits & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u;
  return FromBits(Bits(normal) | special | sign);
}

// The float for an 8-bit float's magnitude, except for NaN and infinity. Subnormal
// inputs never become subnormal floats in between, which are slow on processors.
template <int kMantissaBits, int kBias>
KHVD_INLINE float WidenMagnitude(uint32_t magnitude) {
  constexpr uint32_t kRebias = (127u - kBias) << 23;
  constexpr uint32_t kSmallestNormal = kRebias + (1u << 23);
  const bool subnormal = magnitude < (1u << kMantissaBits);
  const uint32_t bits = magnitude << (23 - kMantissaBits);
  // Puts an implicit one before a subnormal mantissa, and subtracts it again.
  const float surplus = subnormal ? FromBits(kSmallestNormal) : 0.0f;
  return FromBits(bits + (subnormal ? kSmallestNormal : kRebias)) - surplus;
}

KHVD_INLINE float Widen(Float8E5m2 value) {
  const uint32_t magnitude = value.bits & 0x7Fu;
  const uint32_t sign = (value.bits & 0x80u) << 24;
  const uint32_t special = magnitude >= 0x7Cu ? 0x7F800000u : 0u;
  return FromBits(Bits(WidenMagnitude<2, 15>(magnitude)) | special | sign);
}

KHVD_INLINE float Widen(Float8E4m3fn value) {
  const uint32_t magnitude = value.bits & 0x7Fu;
  const uint32_t sign = (value.bits & 0x80u) << 24;
  const uint32_t special = magnitude == 0x7Fu ? 0x7F800000u : 0u;
  return FromBits(Bits(WidenMagnitude<3, 7>(magnitude)) | special | sign);
}

KHVD_INLINE void Narrow(float value, Bfloat16* to) {
  const uint32_t bits = Bits(value);
  const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1);
  const uint32_t quiet_nan = bits | 0x00400000u;
  to->bits = static_cast<uint16_t>(
      ((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded) >> 16);
}

// Rounds to nearest, ties to even, like the hardware's own conversion.
KHVD_INLINE void Narrow(float value, Float16* to) {
  const uint32_t sign = (Bits(value) >> 16) & 0x8000u;
  const uint32_t magnitude = Bits(value) & 0x7FFFFFFFu;
  // Normal results: rebias the exponent and round off the 13 lost bits.
  const uint32_t normal =
      (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1)) >> 13;
  // Results below 2^-14: adding 0.5 moves the mantissa to where the adder rounds it.
  const uint32_t subnormal = Bits(FromBits(magnitude) + 0.5f) - Bits(0.5f);
  uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= (143u << 23) ? 0x7C00u : half;
  half = magnitude > 0x7F800000u ? 0x7E00u | ((magnitude >> 13) & 0x3FFu) : half;
  to->bits = static_cast<uint16_t>(half | sign);
}

// Rounds a float's magnitude to the nearest of an 8-bit type, ties to even. Returns its
// bits, or more than those of the largest number.
//
// The adder does the rounding: the magnitude is added to a number with a last bit that
// is worth that of the type. All ranges use the same code, since compilers do not
// vectorize a sum that only one case uses.
template <int kMantissaBits, int kBias>
KHVD_INLINE int32_t NarrowMagnitude(int32_t magnitude) {
  constexpr int kLostBits = 23 - kMantissaBits;
  constexpr int32_t kSmallestNormal = (128 - kBias) << 23;
  constexpr int32_t kTooLarge = (127 + kBias + 2) << 23;
  const int32_t finite = magnitude < kTooLarge ? magnitude : kTooLarge;
  const int32_t own_exponent = finite & 0x7F800000;
  const int32_t exponent =
      own_exponent > kSmallestNormal ? own_exponent : kSmallestNormal;
  const float unit = FromBits(exponent + (kLostBits << 23));
  const int32_t steps = Bits(FromBits(finite) + unit) - Bits(unit);
  return ((exponent - kSmallestNormal) >> kLostBits) + steps;
}

KHVD_INLINE void Narrow(float value, Float8E5m2* to) {
  const uint32_t sign = (Bits(value) >> 24) & 0x80u;
  const int32_t magnitude = Bits(value) & 0x7FFFFFFFu;
  const int32_t narrow = NarrowMagnitude<2, 15>(magnitude);
  const int32_t most = magnitude > 0x7F800000 ? 0x7E : 0x7C;
  to->bits = static_cast<uint8_t>((narrow < most ? narrow : most) | sign);
}

KHVD_INLINE void Narrow(float value, Float8E4m3fn* to) {
  const uint32_t sign = (Bits(value) >> 24) & 0x80u;
  const int32_t narrow = NarrowMagnitude<3, 7>(Bits(value) & 0x7FFFFFFFu);
  to->bits = static_cast<uint8_t>((narrow < 0x7F ? narrow : 0x7F) | sign);
}

template <typename T>
KHVD_INLINE T Widen(T value) {
  return value;
}
template <typename T, typename A>
KHVD_INLINE void Narrow(A value, T* to) {
  if constexpr (std::is_integral_v<T> && std::is_floating_point_v<A>) {
    // A scaled integer outside its type's range is clamped to the range.
    constexpr A lowest = static_cast<A>(std::numeric_limits<T>::lowest());
    constexpr A highest = static_cast<A>(std::numeric_limits<T>::max());
    if (value >= highest) {
      *to = std::numeric_limits<T>::max();
    } else if (value > lowest) {
      *to = static_cast<T>(value);
    } else {
      // NaN: 0 times a product too large for double.
      *to = value <= lowest ? std::numeric_limits<T>::lowest() : 0;
    }
  } else {
    *to = static_cast<T>(value);
  }
}

// The type that sums are held in. Integers use unsigned types, which wrap around by
// definition.
template <typename T>
struct Accumulator {
  // The narrow floats are the only types that are no numbers of the language.
  using Type = std::conditional_t<std::is_class_v<T>, float, T>;
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
      // In 64 bits: 8-bit types would be promoted to a signed int that may overflow.
      return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    } else {
      return a * b;
    }
  }
};
// A NaN on any rank makes the result NaN, wherever it is.
template <typename A>
struct Smaller {
  KHVD_INLINE A operator()(A a, A b) const { return (b < a || b != b) ? b : a; }
};
template <typename A>
struct Larger {
  KHVD_INLINE A operator()(A a, A b) const { return (a < b || b != b) ? b : a; }
};

}  // namespace keras_hvd
