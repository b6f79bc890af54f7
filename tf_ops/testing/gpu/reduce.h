// The reductions of the NCCL stand-in: of each element in the members' order, so that
// all members have the same result.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "tf_ops/collectives/number.h"
#include "tf_ops/nccl/abi.h"

namespace keras_hvd::stand_in {

inline size_t Bytes(nccl::Type type) {
  constexpr size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kBytes[static_cast<int>(type)];
}

inline const char* Name(nccl::Type type) {
  constexpr const char* kNames[] = {
      "int8",    "uint8",   "int32",   "uint32",   "int64",       "uint64",
      "float16", "float32", "float64", "bfloat16", "float8_e4m3", "float8_e5m2"};
  return kNames[static_cast<int>(type)];
}

// A member's elements, and the factor that multiplies each first; null: none.
struct ReduceInput {
  const char* data = nullptr;
  const char* scale = nullptr;
};

template <typename T>
auto Load(const char* from, size_t index) {
  T value;
  memcpy(&value, from + index * sizeof(T), sizeof(T));
  return Widen(value);
}

template <typename T>
void Store(typename Accumulator<T>::Type value, char* to, size_t index) {
  T narrow;
  Narrow(value, &narrow);
  memcpy(to + index * sizeof(T), &narrow, sizeof(T));
}

template <typename A>
A Combine(A a, A b, nccl::Op op) {
  if (op == nccl::kProduct) return Multiply<A>()(a, b);
  if (op == nccl::kMax) return Larger<A>()(a, b);
  if (op == nccl::kMin) return Smaller<A>()(a, b);
  return Add<A>()(a, b);
}

template <typename T>
void ReduceOf(nccl::Op op, const std::vector<ReduceInput>& inputs, size_t from,
              size_t count, char* output) {
  using A = typename Accumulator<T>::Type;
  constexpr bool kIsInteger = std::is_integral_v<T>;
  for (size_t i = 0; i < count; ++i) {
    A sum{};
    for (size_t member = 0; member < inputs.size(); ++member) {
      A value = Load<T>(inputs[member].data, from + i);
      if (inputs[member].scale != nullptr) {
        value = Multiply<A>()(value, Load<T>(inputs[member].scale, 0));
      } else if (op == nccl::kAverage && !kIsInteger) {
        // NCCL's average of floats scales before it adds, by a number of the type.
        char part[sizeof(T)];
        Store<T>(A(1) / static_cast<A>(inputs.size()), part, 0);
        value = Multiply<A>()(value, Load<T>(part, 0));
      }
      sum = member == 0 ? value : Combine(sum, value, op);
    }
    if (op == nccl::kAverage && kIsInteger) sum /= static_cast<A>(inputs.size());
    Store<T>(sum, output, i);
  }
}

// Of the elements from `from` on, one input of each member. An op that was made is a
// sum whose inputs have scales.
inline void Reduce(nccl::Type type, nccl::Op op, const std::vector<ReduceInput>& inputs,
                   size_t from, size_t count, char* output) {
  switch (type) {
    case nccl::Type::kInt8: return ReduceOf<int8_t>(op, inputs, from, count, output);
    case nccl::Type::kUint8: return ReduceOf<uint8_t>(op, inputs, from, count, output);
    case nccl::Type::kInt32: return ReduceOf<int32_t>(op, inputs, from, count, output);
    case nccl::Type::kUint32:
      return ReduceOf<uint32_t>(op, inputs, from, count, output);
    case nccl::Type::kInt64: return ReduceOf<int64_t>(op, inputs, from, count, output);
    case nccl::Type::kUint64:
      return ReduceOf<uint64_t>(op, inputs, from, count, output);
    case nccl::Type::kFloat16:
      return ReduceOf<Float16>(op, inputs, from, count, output);
    case nccl::Type::kFloat32: return ReduceOf<float>(op, inputs, from, count, output);
    case nccl::Type::kFloat64: return ReduceOf<double>(op, inputs, from, count, output);
    case nccl::Type::kBfloat16:
      return ReduceOf<Bfloat16>(op, inputs, from, count, output);
    case nccl::Type::kFloat8e4m3:
      return ReduceOf<Float8E4m3fn>(op, inputs, from, count, output);
    case nccl::Type::kFloat8e5m2:
      return ReduceOf<Float8E5m2>(op, inputs, from, count, output);
  }
}

}  // namespace keras_hvd::stand_in
