// The direct scheme over shared memory. Each member owns a part of each tensor and
//   1. gets its parts of all members' tensors;
//   2. at each level of the tree: sums the products over its parts, gets the other
//      members' sums, derives the coefficients, and combines its parts, two vectors
//      into one;
//   3. gives its parts of the last vector to all.
// All members therefore see the same sums, and one member computes each element.
#include "tf_ops/collectives/adasum.h"

#include <memory>
#include <utility>

#include "tf_ops/collectives/allgather_values.h"
#include "tf_ops/collectives/hosts_parts.h"
#include "tf_ops/collectives/number.h"
#include "tf_ops/collectives/parts.h"

namespace keras_hvd {
namespace {

// Products are accumulated in this many sums, which the compiler turns into vector
// code. The bits of the result depend on their number.
constexpr int kLanes = 8;

struct Products {
  double ab = 0, aa = 0, bb = 0;
};
constexpr int kProducts = 3;

template <typename A>
Products ProductsOf(const A* a, const A* b, int64_t elements) {
  double ab[kLanes] = {}, aa[kLanes] = {}, bb[kLanes] = {};
  const auto add = [&](int lane, double x, double y) {
    ab[lane] += x * y;
    aa[lane] += x * x;
    bb[lane] += y * y;
  };
  const int64_t whole = elements / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) add(lane, a[i + lane], b[i + lane]);
  }
  for (int64_t i = whole; i < elements; ++i) add(i % kLanes, a[i], b[i]);
  Products sum;
  for (int lane = 0; lane < kLanes; ++lane) {
    sum.ab += ab[lane];
    sum.aa += aa[lane];
    sum.bb += bb[lane];
  }
  return sum;
}

template <typename A>
void Combine(A* a, const A* b, int64_t elements, const Products& products) {
  // A vector of zeros adds nothing, whatever its coefficient.
  const double of_a = products.aa > 0 ? 1 - products.ab / (2 * products.aa) : 1;
  const double of_b = products.bb > 0 ? 1 - products.ab / (2 * products.bb) : 1;
  for (int64_t i = 0; i < elements; ++i) {
    a[i] = static_cast<A>(of_a * static_cast<double>(a[i]) +
                          of_b * static_cast<double>(b[i]));
  }
}

// Calls visit(T(), A()) with the element type and the type used for computing.
template <typename Visit>
void WithTypes(DataType dtype, const Visit& visit) {
  switch (dtype) {
    case DataType::kFloat16: return visit(Float16(), float());
    case DataType::kBfloat16: return visit(Bfloat16(), float());
    case DataType::kFloat8E5m2: return visit(Float8E5m2(), float());
    case DataType::kFloat8E4m3fn: return visit(Float8E4m3fn(), float());
    case DataType::kFloat32: return visit(float(), float());
    case DataType::kFloat64: return visit(double(), double());
    default:  // such tensors have no elements
      return;
  }
}

// This member's part of one tensor, for all members' vectors, one after another.
class Slice {
 public:
  Slice(DataType dtype, int64_t elements, int members)
      : dtype_(dtype), elements_(elements) {
    WithTypes(dtype, [&](auto, auto wide) {
      memory_.reset(new char[members * elements * sizeof(wide)]);
    });
  }

  int64_t bytes() const { return elements_ * Bytes(dtype_); }

  void Read(int member, int64_t offset, int64_t bytes, const void* from,
            double prescale) {
    WithTypes(dtype_, [&](auto narrow, auto wide) {
      const auto* elements = static_cast<const decltype(narrow)*>(from);
      auto* to = Vector<decltype(wide)>(member) + offset / Bytes(dtype_);
      const auto scale = static_cast<decltype(wide)>(prescale);
      for (int64_t i = 0; i < bytes / Bytes(dtype_); ++i) {
        to[i] = Widen(elements[i]) * scale;
      }
    });
  }

  Products MultiplyVectors(int a, int b) {
    Products products;
    WithTypes(dtype_, [&](auto, auto wide) {
      using A = decltype(wide);
      products = ProductsOf(Vector<A>(a), Vector<A>(b), elements_);
    });
    return products;
  }

  void CombineVectors(int a, int b, const Products& products) {
    WithTypes(dtype_, [&](auto, auto wide) {
      using A = decltype(wide);
      Combine(Vector<A>(a), Vector<A>(b), elements_, products);
    });
  }

  // Writes the first vector.
  void Write(double postscale, void* to) {
    WithTypes(dtype_, [&](auto narrow, auto wide) {
      auto* elements = static_cast<decltype(narrow)*>(to);
      const auto* from = Vector<decltype(wide)>(0);
      const auto scale = static_cast<decltype(wide)>(postscale);
      for (int64_t i = 0; i < elements_; ++i) Narrow(from[i] * scale, elements + i);
    });
  }

 private:
  template <typename A>
  A* Vector(int member) {
    return reinterpret_cast<A*>(memory_.get()) + member * elements_;
  }

  DataType dtype_;
  int64_t elements_;
  std::unique_ptr<char[]> memory_;
};

Parts PartsOf(const std::vector<AllreduceTensor>& tensors, int members) {
  std::vector<std::vector<int64_t>> starts;
  for (const AllreduceTensor& tensor : tensors) {
    starts.push_back(PartStarts(tensor.elements, Bytes(tensor.dtype), members));
  }
  return Parts(std::move(starts));
}

// Combines pairs of vectors that are `distance` apart, throughout the group.
template <typename Group>
bool CombineLevel(int distance, Group* communicator, std::vector<Slice>* slices) {
  const int members = communicator->count();
  std::vector<double> own;
  for (Slice& slice : *slices) {
    for (int a = 0; a < members; a += 2 * distance) {
      const Products products = slice.MultiplyVectors(a, a + distance);
      own.insert(own.end(), {products.ab, products.aa, products.bb});
    }
  }
  std::vector<std::vector<double>> all;
  if (!communicator->NextRound() || !AllgatherValues(own, communicator, &all))
    return false;
  size_t next = 0;
  for (Slice& slice : *slices) {
    for (int a = 0; a < members; a += 2 * distance, next += kProducts) {
      Products products;
      for (const std::vector<double>& of_member : all) {
        products.ab += of_member[next];
        products.aa += of_member[next + 1];
        products.bb += of_member[next + 2];
      }
      slice.CombineVectors(a, a + distance, products);
    }
  }
  return true;
}

}  // namespace

template <typename Group>
bool Adasum(const AdasumOptions& options, Group* communicator) {
  const StandardFloatingPoint floating_point;
  const int members = communicator->count();
  const int self = communicator->index();
  const Parts parts = PartsOf(options.tensors, members);
  std::vector<Slice> slices;
  std::vector<const void*> inputs;
  for (size_t i = 0; i < options.tensors.size(); ++i) {
    const AllreduceTensor& tensor = options.tensors[i];
    slices.emplace_back(tensor.dtype, parts.of(self)[i].bytes / Bytes(tensor.dtype),
                        members);
    inputs.push_back(tensor.input);
  }
  const bool scattered = Scatter(
      parts, inputs, communicator,
      [&](size_t tensor, int64_t offset, int64_t bytes, const void* const* stretches) {
        for (int member = 0; member < members; ++member) {
          slices[tensor].Read(member, offset, bytes, stretches[member],
                              options.prescale);
        }
      });
  if (!scattered) return false;
  for (int distance = 1; distance < members; distance *= 2) {
    if (!CombineLevel(distance, communicator, &slices)) return false;
  }
  std::vector<const void*> own;
  std::vector<void*> outputs;
  for (size_t i = 0; i < slices.size(); ++i) {
    outputs.push_back(options.tensors[i].output);
    char* part = static_cast<char*>(outputs.back()) + parts.of(self)[i].start;
    slices[i].Write(options.postscale, part);
    own.push_back(part);
  }
  return communicator->NextRound() && Gather(parts, own, communicator, outputs);
}

template bool Adasum(const AdasumOptions&, Communicator*);
template bool Adasum(const AdasumOptions&, HostsCommunicator*);

}  // namespace keras_hvd
