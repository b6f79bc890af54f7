// The kinds of collectives and their needs: the C API's table, for C++.
#pragma once

#include <cstdint>
#include <iterator>

#include "tf_ops/engine/c_api.h"

namespace keras_hvd {

enum class Kind : int32_t {
#define KHVD_KIND(UPPER, Camel, lower, ...) k##Camel = KHVD_##UPPER,
  KHVD_KINDS(KHVD_KIND)
#undef KHVD_KIND
  // Agreements of all ranks, which move no data. The C API has no such requests.
  kAddProcessSet = 100,
  kRemoveProcessSet = 101,
  kJoin = 102,
};
inline bool IsAgreement(Kind kind) { return kind >= Kind::kAddProcessSet; }

struct KindTraits {
  const char* name;
  // For collectives; see KHVD_KINDS.
  bool has_tensors = false;
  bool takes_group = false;
  bool reduces = false;
  bool moves_rows = false;
  bool has_own_rows = false;
  bool gives_parts = false;
};

inline constexpr KindTraits kCollectives[] = {
#define KHVD_KIND(UPPER, Camel, lower, ...) {#lower, __VA_ARGS__},
    KHVD_KINDS(KHVD_KIND)
#undef KHVD_KIND
};
inline constexpr int kKinds = std::size(kCollectives);
inline constexpr KindTraits kAgreements[] = {
    {"add_process_set"}, {"remove_process_set"}, {"join"}};

inline const KindTraits& TraitsOf(Kind kind) {
  const auto number = static_cast<uint32_t>(kind);
  if (number < kKinds) return kCollectives[number];
  return kAgreements[(number - static_cast<uint32_t>(Kind::kAddProcessSet)) % 3];
}

inline const char* Name(Kind kind) { return TraitsOf(kind).name; }
inline bool HasOwnRows(Kind kind) { return TraitsOf(kind).has_own_rows; }
inline bool Reduces(Kind kind) { return TraitsOf(kind).reduces; }

}  // namespace keras_hvd
