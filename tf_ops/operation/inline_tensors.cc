#include "tf_ops/operation/inline_tensors.h"

#include <algorithm>
#include <cstring>

#include "tf_ops/collectives/processor.h"
#include "tf_ops/collectives/staged_reduction.h"

namespace keras_hvd {
namespace {

// Up to this size, copying into and out of messages costs less than meeting again.
constexpr int64_t kMostOnOneHost = 1 << 10;
// Between hosts, meeting again is another trip over the network.
constexpr int64_t kMostBetweenHosts = 16 << 10;
// The coordinator reads and reduces the inputs of all ranks. With more than this it
// would take longer than to meet again.
constexpr int64_t kMostOfAllRanks = 32 << 10;
// Enough for every element type.
constexpr int64_t kAlignment = 8;

int64_t DataBytes(const TensorDescription& tensor) {
  return Elements(tensor) * Bytes(tensor.dtype);
}

int64_t PackedBytes(const TensorDescription& tensor) {
  return (DataBytes(tensor) + kAlignment - 1) / kAlignment * kAlignment;
}

int64_t PackedBytes(const Description& description) {
  int64_t bytes = 0;
  for (const TensorDescription& tensor : description.tensors) {
    bytes += PackedBytes(tensor);
  }
  return bytes;
}

}  // namespace

int64_t MostInlineBytes(int ranks, int hosts) {
  const int64_t most = hosts == 1 ? kMostOnOneHost : kMostBetweenHosts;
  return std::min(most, kMostOfAllRanks / ranks);
}

bool TravelsInline(const Description& description, size_t members, int64_t most_bytes) {
  if (description.kind != Kind::kAllreduce || description.on_gpu || members == 1 ||
      description.reduction.op == ReduceOp::kAdasum) {
    return false;
  }
  const int64_t bytes = PackedBytes(description);
  return bytes > 0 && bytes <= most_bytes;
}

bool FitsInline(const Description& description, size_t bytes) {
  return TravelsInline(description, /*members=*/2, kMostBetweenHosts) &&
         static_cast<size_t>(PackedBytes(description)) == bytes;
}

void AppendInputs(const Operation& operation, std::string* message) {
  const std::vector<TensorDescription>& tensors = operation.description->tensors;
  message->reserve(message->size() + PackedBytes(*operation.description));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t bytes = DataBytes(tensors[i]);
    if (bytes == 0) continue;
    message->append(static_cast<const char*>(operation.buffers[i].input), bytes);
    message->append(PackedBytes(tensors[i]) - bytes, '\0');
  }
}

void AppendResults(const Description& description,
                   const std::vector<std::string>& inputs,
                   const std::vector<int>& hosts, std::string* message) {
  const StandardFloatingPoint floating_point;
  const size_t start = message->size();
  const int64_t bytes = PackedBytes(description);
  message->append(bytes, '\0');
  std::string zeros;
  std::vector<const char*> given;
  given.reserve(inputs.size());
  for (const std::string& input : inputs) {
    if (input.empty()) zeros.resize(bytes);
    given.push_back(input.empty() ? zeros.data() : input.data());
  }
  std::vector<const void*> addresses(inputs.size());
  int64_t offset = 0;
  for (const TensorDescription& tensor : description.tensors) {
    std::transform(given.begin(), given.end(), addresses.begin(),
                   [&](const char* input) { return input + offset; });
    ReduceInStages(description.reduction, tensor.dtype, addresses, hosts,
                   Elements(tensor), message->data() + start + offset);
    offset += PackedBytes(tensor);
  }
}

bool UnpackResults(std::string_view* from, const Operation& operation) {
  const int64_t needed = PackedBytes(*operation.description);
  if (from->size() < static_cast<size_t>(needed)) return false;
  const std::vector<TensorDescription>& tensors = operation.description->tensors;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t bytes = DataBytes(tensors[i]);
    if (bytes > 0) memcpy(operation.buffers[i].output, from->data(), bytes);
    from->remove_prefix(PackedBytes(tensors[i]));
  }
  return true;
}

}  // namespace keras_hvd
