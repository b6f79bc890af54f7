// The kinds of collectives, and what each needs: one table, with a row for each.
#ifndef KERAS_HVD_TF_OPS_OPERATION_KIND_H_
#define KERAS_HVD_TF_OPS_OPERATION_KIND_H_

#include <cstdint>

namespace keras_hvd {

enum class Kind : int32_t {
  kAllreduce = 0,
  kAllgather = 1,
  kBroadcast = 2,
  kBarrier = 3,
  kReducescatter = 4,
  kAlltoall = 5,
  // What all ranks agree on without moving data. No request of the C API has these.
  kAddProcessSet = 100,
  kRemoveProcessSet = 101,
  kJoin = 102,
};
// Of the C API.
inline constexpr int kKinds = 6;
const char* Name(Kind kind);
inline bool IsAgreement(Kind kind) { return kind >= Kind::kAddProcessSet; }

struct KindTraits {
  const char* name;
  bool has_tensors = true;
  // Takes several tensors at once.
  bool takes_group = false;
  // Combines a tensor's elements of all ranks.
  bool reduces = false;
  // Moves rows, so that a tensor needs a first dimension.
  bool moves_rows = false;
  // The ranks' first dimensions may differ; results are allocated when all are known.
  bool has_own_rows = false;
  // What a member gets depends on its index among the members.
  bool gives_parts = false;
};

// Of a collective; an agreement has a name alone.
const KindTraits& TraitsOf(Kind kind);

inline bool HasOwnRows(Kind kind) { return TraitsOf(kind).has_own_rows; }
inline bool Reduces(Kind kind) { return TraitsOf(kind).reduces; }

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_OPERATION_KIND_H_
