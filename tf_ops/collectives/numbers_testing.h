// For tests: the elements of tensors as numbers, whatever their type.
#pragma once

#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "tf_ops/collectives/dtype.h"
#include "tf_ops/collectives/number.h"

namespace keras_hvd {

// Calls body(T()) with the type of the elements.
template <typename Body>
void WithType(DataType dtype, const Body& body) {
  switch (dtype) {
    case DataType::kUint8: return body(uint8_t());
    case DataType::kInt8: return body(int8_t());
    case DataType::kInt32: return body(int32_t());
    case DataType::kInt64: return body(int64_t());
    case DataType::kFloat16: return body(Float16());
    case DataType::kBfloat16: return body(Bfloat16());
    case DataType::kFloat32: return body(float());
    case DataType::kFloat64: return body(double());
    case DataType::kBool: return body(bool());
    case DataType::kUint32: return body(uint32_t());
    case DataType::kUint64: return body(uint64_t());
    case DataType::kFloat8E5m2: return body(Float8E5m2());
    case DataType::kFloat8E4m3fn: return body(Float8E4m3fn());
    case DataType::kInt16: return body(int16_t());
    case DataType::kUint16: return body(uint16_t());
    case DataType::kComplex64: return body(std::complex<float>());
    case DataType::kComplex128: return body(std::complex<double>());
  }
}

// Integers wrap around.
template <typename T>
void Convert(double number, T* to) {
  if constexpr (std::is_same_v<T, bool>) {
    *to = number != 0;
  } else if constexpr (std::is_integral_v<T>) {
    *to = static_cast<T>(static_cast<int64_t>(number));
  } else {
    Narrow(static_cast<typename Accumulator<T>::Type>(number), to);
  }
}
template <typename T>
void Convert(double number, std::complex<T>* to) {
  *to = {static_cast<T>(number), static_cast<T>(-number)};
}

template <typename T>
double AsNumber(T element) {
  return static_cast<double>(Widen(element));
}
template <typename T>
double AsNumber(std::complex<T> element) {
  return element.imag() == -element.real() ? element.real() : std::nan("");
}

inline std::vector<char> Encoded(DataType dtype, const std::vector<double>& numbers) {
  std::vector<char> elements(numbers.size() * Bytes(dtype));
  WithType(dtype, [&](auto element) {
    for (size_t i = 0; i < numbers.size(); ++i) {
      Convert(numbers[i], &element);
      memcpy(elements.data() + i * sizeof(element), &element, sizeof(element));
    }
  });
  return elements;
}

inline std::vector<double> Decoded(DataType dtype, const std::vector<char>& elements) {
  std::vector<double> numbers(elements.size() / Bytes(dtype));
  WithType(dtype, [&](auto element) {
    for (size_t i = 0; i < numbers.size(); ++i) {
      memcpy(&element, elements.data() + i * sizeof(element), sizeof(element));
      numbers[i] = AsNumber(element);
    }
  });
  return numbers;
}

// The relative tolerance for a result that is rounded to a narrow type once, and a few
// times where it is computed in its own type.
inline double Tolerance(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat16: return 1e-3;
    case DataType::kBfloat16: return 8e-3;
    case DataType::kFloat8E5m2: return 1.0 / (1 << 3);
    case DataType::kFloat8E4m3fn: return 1.0 / (1 << 4);
    case DataType::kFloat32: return 1e-6;
    case DataType::kFloat64: return 1e-14;
    default: return 0;
  }
}

}  // namespace keras_hvd
