// See description.h.
#include "tf_ops/operation/description.h"

#include <algorithm>
#include <cstdio>

namespace keras_hvd {
namespace {

constexpr size_t kTensorsShown = 3;

// In bytes. Names are unlimited, and a text is copied many times on its way to a user.
constexpr size_t kNameShown = 512;

// Whether a byte continues a UTF-8 character.
bool IsInsideCharacter(char byte) { return (byte & 0xc0) == 0x80; }

std::string ScaleText(double scale) {
  char text[32];
  snprintf(text, sizeof(text), "%.9g", scale);
  return text;
}

// The other dimensions of an empty tensor may be so large that they overflow.
int64_t Product(int64_t product, const std::vector<int64_t>& shape, size_t first) {
  bool empty = false;
  for (size_t i = first; i < shape.size(); ++i) {
    empty |= shape[i] == 0;
    product = static_cast<int64_t>(static_cast<uint64_t>(product) * shape[i]);
  }
  return empty ? 0 : product;
}

std::string TensorText(const TensorDescription& tensor, bool any_rows) {
  std::string text = Name(tensor.dtype);
  text += "[";
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    if (i > 0) text += ",";
    text += i == 0 && any_rows ? "any" : std::to_string(tensor.shape[i]);
  }
  return text + "]";
}

}  // namespace

bool Description::Matches(const Description& other) const {
  return kind == other.kind && reduction == other.reduction && root == other.root &&
         tensors == other.tensors && members == other.members && on_gpu == other.on_gpu;
}

bool CanFuse(const Description& first, const Description& other) {
  return first.kind == Kind::kAllreduce && other.kind == Kind::kAllreduce &&
         first.process_set == other.process_set && first.on_gpu == other.on_gpu &&
         first.reduction == other.reduction;
}

bool TakesZeros(const Description& description) {
  const ReduceOp op = description.reduction.op;
  return description.kind == Kind::kAllreduce && description.process_set == 0 &&
         (op == ReduceOp::kSum || op == ReduceOp::kAverage);
}

int64_t Elements(const TensorDescription& tensor) {
  return Product(1, tensor.shape, /*first=*/0);
}

int64_t RowBytes(const TensorDescription& tensor) {
  return Product(Bytes(tensor.dtype), tensor.shape, /*first=*/1);
}

int64_t Description::bytes() const {
  int64_t sum = 0;
  for (const TensorDescription& tensor : tensors) {
    sum += Elements(tensor) * Bytes(tensor.dtype);
  }
  return sum;
}

std::string Quoted(std::string_view name) {
  if (name.size() <= kNameShown) return "'" + std::string(name) + "'";
  size_t head = kNameShown / 2;
  while (head > 0 && IsInsideCharacter(name[head])) --head;
  size_t tail = name.size() - kNameShown / 2;
  while (tail < name.size() && IsInsideCharacter(name[tail])) ++tail;
  std::string text = "'" + std::string(name.substr(0, head)) + "...";
  text += name.substr(tail);
  return text + "' (" + std::to_string(name.size()) + " bytes)";
}

std::string Title(Kind kind, std::string_view name) {
  if (IsAgreement(kind)) return std::string(Name(kind)) + "()";
  return std::string(Name(kind)) + " " + Quoted(name);
}

std::string Title(const Description& description) {
  return Title(description.kind, description.name);
}

std::string RankList(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

std::string Details(const Description& description) {
  std::string text = Name(description.kind);
  if (IsAgreement(description.kind)) {
    return text + " of " + RankList(description.members);
  }
  if (Reduces(description.kind)) {
    text += " " + std::string(Name(description.reduction.op));
  }
  const size_t count = description.tensors.size();
  if (count > 0) text += " of ";
  if (count > 1) text += std::to_string(count) + " tensors ";
  for (size_t i = 0; i < std::min(count, kTensorsShown); ++i) {
    if (i > 0) text += ", ";
    text += TensorText(description.tensors[i], HasOwnRows(description.kind));
  }
  if (count > kTensorsShown) text += ", ...";
  if (description.on_gpu) text += " on a GPU";
  if (description.kind == Kind::kBroadcast) {
    text += " from root " + std::to_string(description.root);
  }
  if (description.reduction.prescale != 1) {
    text += ", prescale " + ScaleText(description.reduction.prescale);
  }
  if (description.reduction.postscale != 1) {
    text += ", postscale " + ScaleText(description.reduction.postscale);
  }
  return text;
}

}  // namespace keras_hvd
