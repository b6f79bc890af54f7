// A rank's description of a request, for matching it with the peers' requests.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tf_ops/collectives/dtype.h"
#include "tf_ops/collectives/reduce.h"
#include "tf_ops/operation/kind.h"
#include "tf_ops/transport/topology.h"

namespace keras_hvd {

struct TensorDescription {
  DataType dtype = DataType::kFloat32;
  // -1 replaces a first dimension that may differ between ranks.
  std::vector<int64_t> shape;

  bool operator==(const TensorDescription& other) const {
    return dtype == other.dtype && shape == other.shape;
  }
};

// 0 if any dimension is 0, whatever the others are.
int64_t Elements(const TensorDescription& tensor);
int64_t RowBytes(const TensorDescription& tensor);

// The name of every join: a rank's come one after the other.
inline constexpr char kJoinName[] = "keras_hvd.join";

struct Description {
  int32_t process_set = 0;
  std::string name;
  Kind kind = Kind::kAllreduce;
  Reduction reduction;
  int32_t root = 0;
  std::vector<TensorDescription> tensors;
  std::vector<int> members;  // of a process set to add or remove
  // To add a process set: the highest number of a set of the rank's earlier jobs. It
  // may differ between ranks.
  int32_t last_earlier_set = 0;
  bool on_gpu = false;  // whether the tensors are
  std::string labels;   // see khvd_request

  // Whether all is equal.
  bool operator==(const Description& other) const;
  // Whether the two, of one name and process set, can be one collective.
  bool Matches(const Description& other) const;
  int64_t bytes() const;
};

// Whether `other` may run in one batch that begins with `first`.
bool CanFuse(const Description& first, const Description& other);

// Whether a rank's zeros leave the others' result unchanged.
bool TakesZeros(const Description& description);

// "'grad/w'". Shows only the two ends of a long name, and controls as "\x1b".
std::string Quoted(std::string_view name);
// "allreduce 'grad/w'"; "join()".
std::string Title(Kind kind, std::string_view name);
std::string Title(const Description& description);
// The properties that must be equal on all ranks: "allreduce Average of float32[3,4]".
std::string Details(const Description& description);
// The first tensor with a label, or line after those of the tensors, in which another
// description differs: ", number 1 is 'dense/kernel' of float32[3,4]"; or "".
std::string FirstDifference(const Description& description, const Description& other);

// "ranks 0, 2: this; rank 1: that".
std::string WhoGaveWhat(const std::vector<std::pair<int, std::string>>& given);

}  // namespace keras_hvd
