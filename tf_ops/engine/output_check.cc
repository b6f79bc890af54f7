#include "tf_ops/engine/output_check.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <utility>

#include "tf_ops/collectives/hashes.h"

namespace keras_hvd {
namespace {

constexpr char kAdvice[] =
    ". A result must have the same bits on all ranks. On a rank that differs, "
    "check whether something else writes to that memory (an op or library that reuses "
    "the buffer, two outputs that overlap), and test its memory and processor; "
    "otherwise this is a bug in keras_hvd: please report it with this message";

int64_t OutputBytes(const Operation& operation, size_t tensor) {
  const Description& description = *operation.description;
  if (HasOwnRows(description.kind)) return operation.allocated_bytes[tensor];
  const TensorDescription& output = description.tensors[tensor];
  return Elements(output) * Bytes(output.dtype);
}

std::vector<uint64_t> HashOutputs(const Batch& operations) {
  std::vector<uint64_t> hashes;
  for (const auto& operation : operations) {
    for (size_t i = 0; i < operation->buffers.size(); ++i) {
      hashes.push_back(operation->out_of_memory ? kNoResult
                                                : Hash(operation->buffers[i].output,
                                                       OutputBytes(*operation, i)));
    }
  }
  return hashes;
}

// The title of tensor `number` of the batch: "tensor 2 of 3 of allreduce 'grad/w'".
std::string TensorTitle(const Batch& operations, size_t number) {
  for (const auto& operation : operations) {
    const Description& description = *operation->description;
    const size_t count = description.tensors.size();
    if (number >= count) {
      number -= count;
      continue;
    }
    if (count == 1) return Title(description);
    return "tensor " + std::to_string(number + 1) + " of " + std::to_string(count) +
           " of " + Title(description);
  }
  return "";
}

bool Differ(const std::vector<std::vector<uint64_t>>& hashes, size_t number) {
  uint64_t known = kNoResult;
  for (const std::vector<uint64_t>& of_member : hashes) {
    const uint64_t hash = of_member[number];
    if (hash == kNoResult) continue;
    if (known != kNoResult && hash != known) return true;
    known = hash;
  }
  return false;
}

// "ranks 0, 2: 0123456789abcdef; rank 1: fedcba9876543210".
std::string WhoHasWhat(const std::vector<std::vector<uint64_t>>& hashes,
                       const std::vector<int>& members, size_t number) {
  std::vector<std::pair<int, std::string>> given;
  for (size_t member = 0; member < members.size(); ++member) {
    const uint64_t hash = hashes[member][number];
    if (hash == kNoResult) continue;
    char digits[20];
    snprintf(digits, sizeof(digits), "%016" PRIx64, hash);
    given.emplace_back(members[member], digits);
  }
  return WhoGaveWhat(given);
}

}  // namespace

bool CompareOutputs(const Batch& operations, const std::vector<int>& members,
                    const HashExchange& exchange, std::string* difference) {
  difference->clear();
  const std::vector<uint64_t> own = HashOutputs(operations);
  std::vector<std::vector<uint64_t>> hashes;
  if (!exchange(own, &hashes)) return false;
  for (size_t number = 0; number < own.size(); ++number) {
    if (!Differ(hashes, number)) continue;
    *difference =
        "the result of " + TensorTitle(operations, number) +
        " differs between ranks (hashes: " + WhoHasWhat(hashes, members, number) + ")" +
        kAdvice;
    return true;
  }
  return true;
}

}  // namespace keras_hvd
