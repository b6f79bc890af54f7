// Element types and reductions. The values are those of the C API.
#pragma once

#include <cstdint>

namespace keras_hvd {

enum class DataType : int32_t {
  kUint8 = 0,
  kInt8 = 1,
  kInt32 = 2,
  kInt64 = 3,
  kFloat16 = 4,
  kBfloat16 = 5,
  kFloat32 = 6,
  kFloat64 = 7,
  kBool = 8,
  kUint32 = 9,
  kUint64 = 10,
  kFloat8E5m2 = 11,
  kFloat8E4m3fn = 12,
  // The types from here on are only moved, never reduced.
  kInt16 = 13,
  kUint16 = 14,
  kComplex64 = 15,
  kComplex128 = 16,
};
inline constexpr int kReducedDataTypes = 13;
inline constexpr int kDataTypes = 17;

enum class ReduceOp : int32_t {
  kAverage = 0,
  kSum = 1,
  kMin = 2,
  kMax = 3,
  kProduct = 4,
  kAdasum = 5,  // not element-wise: see adasum.h
};
inline constexpr int kElementReduceOps = 5;
inline constexpr int kReduceOps = 6;

inline constexpr const char* kDataTypeNames[kDataTypes] = {
    "uint8",         "int8",    "int32",  "int64",     "float16",   "bfloat16",
    "float32",       "float64", "bool",   "uint32",    "uint64",    "float8_e5m2",
    "float8_e4m3fn", "int16",   "uint16", "complex64", "complex128"};
inline constexpr int kDataTypeBytes[kDataTypes] = {1, 1, 4, 8, 2, 2, 4, 8, 1,
                                                   4, 8, 1, 1, 2, 2, 8, 16};
inline constexpr const char* kReduceOpNames[kReduceOps] = {
    "Average", "Sum", "Min", "Max", "Product", "Adasum"};

inline bool IsFloat8(DataType dtype) {
  return dtype == DataType::kFloat8E5m2 || dtype == DataType::kFloat8E4m3fn;
}
inline bool IsFloating(DataType dtype) {
  return (dtype >= DataType::kFloat16 && dtype <= DataType::kFloat64) ||
         IsFloat8(dtype);
}
inline bool IsReduced(DataType dtype) {
  return static_cast<int>(dtype) < kReducedDataTypes;
}
inline bool IsInteger(DataType dtype) {
  return IsReduced(dtype) && !IsFloating(dtype) && dtype != DataType::kBool;
}

inline const char* Name(DataType dtype) {
  return kDataTypeNames[static_cast<int>(dtype)];
}
inline const char* Name(ReduceOp op) { return kReduceOpNames[static_cast<int>(op)]; }
inline int64_t Bytes(DataType dtype) { return kDataTypeBytes[static_cast<int>(dtype)]; }

}  // namespace keras_hvd
