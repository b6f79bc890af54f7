// See kind.h.
#include "tf_ops/operation/kind.h"

namespace keras_hvd {
namespace {

// In the order of the enumeration.
// clang-format off
constexpr KindTraits kCollectives[kKinds] = {
    // name           tensors  group  reduces  rows   own rows  parts
    {"allreduce",     true,    true,  true,    false, false,    false},
    {"allgather",     true,    true,  false,   true,  true,     false},
    {"broadcast",     true,    false, false,   false, false,    false},
    {"barrier",       false,   false, false,   false, false,    false},
    {"reducescatter", true,    true,  true,    true,  false,    true},
    {"alltoall",      true,    false, false,   true,  true,     true},
};
// clang-format on
constexpr KindTraits kAgreements[] = {
    {"add_process_set", false}, {"remove_process_set", false}, {"join", false}};

}  // namespace

const KindTraits& TraitsOf(Kind kind) {
  const auto number = static_cast<uint32_t>(kind);
  if (number < kKinds) return kCollectives[number];
  return kAgreements[(number - static_cast<uint32_t>(Kind::kAddProcessSet)) % 3];
}

const char* Name(Kind kind) { return TraitsOf(kind).name; }

}  // namespace keras_hvd
