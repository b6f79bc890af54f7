// The loops of a reduction. reduce_*.cc includes this file once per instruction set,
// with KHVD_TARGET, KHVD_NAMESPACE, KHVD_VECTOR (the type that a streaming store
// writes) and KHVD_STREAM (that store) defined, and undefines these at its end. Hence
// it has no include guard. KHVD_CONVERTS_HALVES means that WidenHalves and
// NarrowToHalves exist, written with conversion instructions.
#include <algorithm>
#include <cstring>
#include <type_traits>

namespace keras_hvd {
namespace {
namespace KHVD_NAMESPACE {

// Several inputs are combined in blocks that stay in the first-level cache.
constexpr int64_t kBlock = 1024;

// Where the inputs' elements are found in the accumulator's type: in place, or
// converted into a separate block. The block is used where the processor has
// instructions for the conversion, and where the conversion takes so many that they
// would crowd the loops.
#ifdef KHVD_CONVERTS_HALVES
constexpr bool kConvertsHalves = true;
#else
constexpr bool kConvertsHalves = false;
#endif
template <typename T>
struct Converted {
  static constexpr bool kIsBlock = std::is_same_v<T, Float8E5m2> ||
                                   std::is_same_v<T, Float8E4m3fn> ||
                                   (kConvertsHalves && std::is_same_v<T, Float16>);
  using Type = std::conditional_t<kIsBlock, float, T>;
};

template <typename T>
KHVD_INLINE const T* Convert(const T* from, int64_t, T*) {
  return from;
}
template <typename T>
KHVD_INLINE void ConvertBack(const T*, int64_t, T*) {}

template <typename T>
KHVD_INLINE const float* WidenAll(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = Widen(from[i]);
  return to;
}
template <typename T>
KHVD_INLINE void NarrowAll(const float* from, int64_t n, T* to) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) Narrow(from[i], to + i);
}

KHVD_TARGET inline const float* Convert(const Float8E5m2* from, int64_t n, float* to) {
  return WidenAll(from, n, to);
}
KHVD_TARGET inline void ConvertBack(const float* from, int64_t n, Float8E5m2* to) {
  NarrowAll(from, n, to);
}
KHVD_TARGET inline const float* Convert(const Float8E4m3fn* from, int64_t n,
                                        float* to) {
  return WidenAll(from, n, to);
}
KHVD_TARGET inline void ConvertBack(const float* from, int64_t n, Float8E4m3fn* to) {
  NarrowAll(from, n, to);
}

#ifdef KHVD_CONVERTS_HALVES
KHVD_TARGET inline const float* Convert(const Float16* from, int64_t n, float* to) {
  WidenHalves(from, n, to);
  return to;
}
KHVD_TARGET inline void ConvertBack(const float* from, int64_t n, Float16* to) {
  NarrowToHalves(from, n, to);
}
#endif

// An element, multiplied by the scale that applies before the reduction.
template <typename A, bool kScaled, typename C>
KHVD_INLINE A Element(C value, A prescale) {
  const A wide = static_cast<A>(Widen(value));
  if constexpr (kScaled && std::is_integral_v<C>) {
    C scaled;
    Narrow(wide * prescale, &scaled);
    return static_cast<A>(scaled);
  } else if constexpr (kScaled) {
    return static_cast<A>(wide * prescale);
  }
  return wide;
}
template <bool kScaled, typename A, typename C>
KHVD_INLINE void Store(A value, A postscale, C* to) {
  if constexpr (kScaled) value = static_cast<A>(value * postscale);
  Narrow(value, to);
}

// `ivdep`: the result may be one of the inputs, but no element depends on another.
template <typename T, typename A, typename Op, bool kScaled>
KHVD_TARGET void CombineBlocks(const ReduceJob& job) {
  using C = typename Converted<T>::Type;
  constexpr bool kConverts = !std::is_same_v<C, T>;
  const A pre = static_cast<A>(job.prescale);
  const A post = static_cast<A>(job.postscale);
  alignas(64) C converted[kConverts ? 2 : 1][kConverts ? kBlock : 1];
  alignas(64) A sums[kBlock];
  for (int64_t start = 0; start < job.elements; start += kBlock) {
    const int64_t n = std::min(kBlock, job.elements - start);
    const auto input = [&](int i) __attribute__((always_inline)) {
      return static_cast<const T*>(job.inputs[i]) + start;
    };
    T* const target = static_cast<T*>(job.result) + start;
    C* result;
    if constexpr (kConverts) {
      result = converted[0];
    } else {
      result = target;
    }
    const C* a = Convert(input(0), n, converted[0]);
    if (job.count == 1) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) {
        Store<kScaled>(Element<A, kScaled>(a[i], pre), post, result + i);
      }
      ConvertBack(result, n, target);
      continue;
    }
    const C* b = Convert(input(1), n, converted[kConverts ? 1 : 0]);
    if (job.count == 2) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) {
        const A sum =
            Op()(Element<A, kScaled>(a[i], pre), Element<A, kScaled>(b[i], pre));
        Store<kScaled>(sum, post, result + i);
      }
      ConvertBack(result, n, target);
      continue;
    }
    for (int64_t i = 0; i < n; ++i) {
      sums[i] = Op()(Element<A, kScaled>(a[i], pre), Element<A, kScaled>(b[i], pre));
    }
    for (int k = 2; k < job.count - 1; ++k) {
      b = Convert(input(k), n, converted[kConverts ? 1 : 0]);
      for (int64_t i = 0; i < n; ++i) {
        sums[i] = Op()(sums[i], Element<A, kScaled>(b[i], pre));
      }
    }
    b = Convert(input(job.count - 1), n, converted[kConverts ? 1 : 0]);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      Store<kScaled>(Op()(sums[i], Element<A, kScaled>(b[i], pre)), post, result + i);
    }
    ConvertBack(result, n, target);
  }
}

template <typename T, typename A, typename Op>
void Combine(const ReduceJob& job) {
  if (job.prescale == 1 && job.postscale == 1) {
    return CombineBlocks<T, A, Op, false>(job);
  }
  CombineBlocks<T, A, Op, true>(job);
}

template <typename T, typename A>
void CombineWith(ReduceOp op, const ReduceJob& job) {
  switch (op) {
    case ReduceOp::kAverage:
    case ReduceOp::kSum: return Combine<T, A, Add<A>>(job);
    case ReduceOp::kMin: return Combine<T, A, Smaller<A>>(job);
    case ReduceOp::kMax: return Combine<T, A, Larger<A>>(job);
    case ReduceOp::kProduct: return Combine<T, A, Multiply<A>>(job);
    case ReduceOp::kAdasum: return;
  }
}

template <typename T>
void ReduceFloats(ReduceOp op, ReduceJob job) {
  if (op == ReduceOp::kAverage) job.postscale /= job.count;
  CombineWith<T, typename Accumulator<T>::Type>(op, job);
}

template <typename T>
void ReduceIntegers(ReduceOp op, ReduceJob job) {
  if (job.prescale != 1 || job.postscale != 1) {
    if (op == ReduceOp::kAverage) job.postscale /= job.count;
    return CombineWith<T, double>(op, job);
  }
  if (op == ReduceOp::kAverage) return AverageIntegers<T>(job);
  CombineWith<T, T>(op, job);
}

inline void Reduce(ReduceOp op, DataType dtype, const ReduceJob& job) {
  switch (dtype) {
    case DataType::kUint8:
    // Truth values are 0 and 1, so And is the minimum and Or the maximum.
    case DataType::kBool: return ReduceIntegers<uint8_t>(op, job);
    case DataType::kInt8: return ReduceIntegers<int8_t>(op, job);
    case DataType::kInt32: return ReduceIntegers<int32_t>(op, job);
    case DataType::kInt64: return ReduceIntegers<int64_t>(op, job);
    case DataType::kUint32: return ReduceIntegers<uint32_t>(op, job);
    case DataType::kUint64: return ReduceIntegers<uint64_t>(op, job);
    case DataType::kFloat8E5m2: return ReduceFloats<Float8E5m2>(op, job);
    case DataType::kFloat8E4m3fn: return ReduceFloats<Float8E4m3fn>(op, job);
    case DataType::kFloat16: return ReduceFloats<Float16>(op, job);
    case DataType::kBfloat16: return ReduceFloats<Bfloat16>(op, job);
    case DataType::kFloat32: return ReduceFloats<float>(op, job);
    case DataType::kFloat64: return ReduceFloats<double>(op, job);
    case DataType::kInt16:
    case DataType::kUint16:
    case DataType::kComplex64:
    case DataType::kComplex128: return;  // see Supports()
  }
}

// Written with vector types, since compilers emit no streaming stores for plain loops.
template <typename T, bool kScaled, bool kStreamOutput, bool kStreamExchange>
KHVD_TARGET void AddVectors(const TwofoldJob& twofold) {
  typedef T Vector __attribute__((vector_size(sizeof(KHVD_VECTOR))));
  constexpr int64_t kLanes = sizeof(Vector) / sizeof(T);
  const ReduceJob& job = twofold.job;
  const int count = job.count;
  const auto* const* inputs = reinterpret_cast<const T* const*>(job.inputs);
  const T* const first = inputs[0];
  const T* const second = inputs[count > 1 ? 1 : 0];
  T* const output = static_cast<T*>(job.result);
  T* const exchange = static_cast<T*>(twofold.exchange);
  const T pre = static_cast<T>(job.prescale);
  const T post = static_cast<T>(job.postscale);
  // memcpy reads and writes unaligned vectors.
  Vector sum, next;
  int64_t i = 0;
  for (; i + kLanes <= job.elements; i += kLanes) {
    memcpy(&sum, first + i, sizeof(sum));
    if constexpr (kScaled) sum *= pre;
    if (count > 1) {
      memcpy(&next, second + i, sizeof(next));
      if constexpr (kScaled) next *= pre;
      sum += next;
    }
    for (int input = 2; input < count; ++input) {
      memcpy(&next, inputs[input] + i, sizeof(next));
      if constexpr (kScaled) next *= pre;
      sum += next;
    }
    if constexpr (kScaled) sum *= post;
    KHVD_VECTOR bits;
    memcpy(&bits, &sum, sizeof(bits));
    if constexpr (kStreamOutput) {
      KHVD_STREAM(reinterpret_cast<KHVD_VECTOR*>(output + i), bits);
    }
    if constexpr (kStreamExchange) {
      KHVD_STREAM(reinterpret_cast<KHVD_VECTOR*>(exchange + i), bits);
    }
    if constexpr (!kStreamOutput) memcpy(output + i, &sum, sizeof(sum));
    if constexpr (!kStreamExchange) memcpy(exchange + i, &sum, sizeof(sum));
  }
  for (; i < job.elements; ++i) {
    T value = Element<T, kScaled>(first[i], pre);
    for (int input = 1; input < count; ++input) {
      value += Element<T, kScaled>(inputs[input][i], pre);
    }
    Store<kScaled>(value, post, exchange + i);
    output[i] = exchange[i];
  }
}

template <typename T, bool kScaled>
void AddWithStores(const TwofoldJob& twofold) {
  switch (kHasStreamingStores ? twofold.stores : Stores::kOrdinary) {
    case Stores::kOrdinary: return AddVectors<T, kScaled, false, false>(twofold);
    case Stores::kStreamingResult: return AddVectors<T, kScaled, true, false>(twofold);
    case Stores::kStreaming: return AddVectors<T, kScaled, true, true>(twofold);
  }
}

template <typename T>
void AddFloats(const TwofoldJob& twofold) {
  if (twofold.job.prescale == 1 && twofold.job.postscale == 1) {
    return AddWithStores<T, false>(twofold);
  }
  AddWithStores<T, true>(twofold);
}

inline void AddToBoth(DataType dtype, const TwofoldJob& twofold) {
  if (dtype == DataType::kFloat32) return AddFloats<float>(twofold);
  AddFloats<double>(twofold);
}

}  // namespace KHVD_NAMESPACE
}  // namespace
}  // namespace keras_hvd

#undef KHVD_NAMESPACE
#undef KHVD_TARGET
#undef KHVD_VECTOR
#undef KHVD_STREAM
