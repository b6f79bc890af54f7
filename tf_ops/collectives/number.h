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
// As the half-precision numbers with 2 bits of mantissa in place of 10.
struct Float8E5m2 {
  uint8_t bits;
};
// Without infinities: the largest exponent has numbers too, up to 448, and one NaN.
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

// The float of an 8-bit one's magnitude, NaN and infinity left aside. Subnormal numbers
// never are subnormal floats in between, which processors take long for.
template <int kMantissaBits, int kBias>
KHVD_INLINE float WidenMagnitude(uint32_t magnitude) {
  constexpr uint32_t kRebias = (127u - kBias) << 23;
  constexpr uint32_t kSmallestNormal = kRebias + (1u << 23);
  const bool subnormal = magnitude < (1u << kMantissaBits);
  const uint32_t bits = magnitude << (23 - kMantissaBits);
  // The mantissa behind a one that it has not, which is then taken away.
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

// A float's magnitude to the nearest of an 8-bit type, ties to even: its bits, or more
// than those of the largest number.
//
// The unit adder rounds, beside a number whose last bit is worth the type's, in all
// ranges alike: compilers make no vector code of a sum that is used in one case only.
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
    // A scaled integer that leaves its type's range stays at the range's end.
    constexpr A lowest = static_cast<A>(std::numeric_limits<T>::lowest());
    constexpr A highest = static_cast<A>(std::numeric_limits<T>::max());
    if (value >= highest) {
      *to = std::numeric_limits<T>::max();
    } else if (value > lowest) {
      *to = static_cast<T>(value);
    } else {
      // No number is what 0 times a product beyond all doubles gives.
      *to = value <= lowest ? std::numeric_limits<T>::lowest() : 0;
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
template <>
struct Accumulator<Float8E5m2> {
  using Type = float;
};
template <>
struct Accumulator<Float8E4m3fn> {
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
