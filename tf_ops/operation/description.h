// What a rank says about a request, so that it can be matched with its peers'.
#ifndef KERAS_HVD_TF_OPS_OPERATION_DESCRIPTION_H_
#define KERAS_HVD_TF_OPS_OPERATION_DESCRIPTION_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tf_ops/collectives/dtype.h"
#include "tf_ops/collectives/reduce.h"
#include "tf_ops/operation/kind.h"

namespace keras_hvd {

struct TensorDescription {
  DataType dtype = DataType::kFloat32;
  // A first dimension that may differ between ranks is not part of this, but -1.
  std::vector<int64_t> shape;

  bool operator==(const TensorDescription& other) const {
    return dtype == other.dtype && shape == other.shape;
  }
};

// None where a dimension is 0, whatever the others are.
int64_t Elements(const TensorDescription& tensor);
int64_t RowBytes(const TensorDescription& tensor);

struct Description {
  int32_t process_set = 0;
  std::string name;
  Kind kind = Kind::kAllreduce;
  Reduction reduction;
  int32_t root = 0;
  std::vector<TensorDescription> tensors;
  std::vector<int> members;  // of a process set that is added or removed
  bool on_gpu = false;       // the tensors

  // Whether the two can be one collective.
  bool Matches(const Description& other) const;
  int64_t bytes() const;
};

// Whether an operation may run in one batch with another, which comes first in it.
bool CanFuse(const Description& first, const Description& other);

// Whether a rank that gives zeros leaves the others' result as it is.
bool TakesZeros(const Description& description);

// "'grad/w'"; of a long name its two ends.
std::string Quoted(std::string_view name);
// "allreduce 'grad/w'"; "join()".
std::string Title(Kind kind, std::string_view name);
std::string Title(const Description& description);
// "allreduce Average of float32[3,4]": what must be equal on all ranks.
std::string Details(const Description& description);

// "rank 0"; "ranks 0, 2".
std::string RankList(const std::vector<int>& ranks);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_OPERATION_DESCRIPTION_H_
