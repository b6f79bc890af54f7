// The engine's element types, and their names in TensorFlow and XLA.
#pragma once

// clang-format off
#define KERAS_HVD_ELEMENT_TYPES(TYPE) \
  TYPE(UINT8,         UINT8,         U8)       \
  TYPE(INT8,          INT8,          S8)       \
  TYPE(INT32,         INT32,         S32)      \
  TYPE(INT64,         INT64,         S64)      \
  TYPE(FLOAT16,       HALF,          F16)      \
  TYPE(BFLOAT16,      BFLOAT16,      BF16)     \
  TYPE(FLOAT32,       FLOAT,         F32)      \
  TYPE(FLOAT64,       DOUBLE,        F64)      \
  TYPE(BOOL,          BOOL,          PRED)     \
  TYPE(UINT32,        UINT32,        U32)      \
  TYPE(UINT64,        UINT64,        U64)      \
  TYPE(FLOAT8_E5M2,   FLOAT8_E5M2,   F8E5M2)   \
  TYPE(FLOAT8_E4M3FN, FLOAT8_E4M3FN, F8E4M3FN) \
  TYPE(INT16,         INT16,         S16)      \
  TYPE(UINT16,        UINT16,        U16)      \
  TYPE(COMPLEX64,     COMPLEX64,     C64)      \
  TYPE(COMPLEX128,    COMPLEX128,    C128)
// clang-format on
