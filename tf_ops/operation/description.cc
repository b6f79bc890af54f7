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

// Replaces control characters by "\\x1b" and the like: a name is a user's.
std::string Printable(std::string_view text) {
  std::string printable;
  for (size_t i = 0; i < text.size(); ++i) {
    const uint8_t code = text[i], next = i + 1 < text.size() ? text[i + 1] : 0;
    // In UTF-8, controls from 0x80 on have two bytes.
    const bool is_wide = code == 0xc2 && next >= 0x80 && next < 0xa0;
    if (!is_wide && code >= 0x20 && code != 0x7f) {
      printable += text[i];
      continue;
    }
    char escaped[8];
    snprintf(escaped, sizeof(escaped), "\\x%02x", is_wide ? next : code);
    printable += escaped;
    if (is_wide) ++i;
  }
  return printable;
}

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

std::vector<std::string_view> Lines(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

bool EndsWithParts(std::string_view longer, std::string_view parts) {
  if (longer.size() <= parts.size() || parts.empty()) return longer == parts;
  const std::string_view end = longer.substr(longer.size() - parts.size());
  return end == parts && longer[longer.size() - parts.size() - 1] == '/';
}

bool IsSameLabel(std::string_view a, std::string_view b) {
  return a.size() < b.size() ? EndsWithParts(b, a) : EndsWithParts(a, b);
}

bool HaveMatchingLabels(const Description& a, const Description& b) {
  if (a.labels == b.labels) return true;
  const std::vector<std::string_view> of_a = Lines(a.labels), of_b = Lines(b.labels);
  return std::equal(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(), IsSameLabel);
}

}  // namespace

bool Description::operator==(const Description& other) const {
  return process_set == other.process_set && name == other.name &&
         labels == other.labels && last_earlier_set == other.last_earlier_set &&
         Matches(other);
}

bool Description::Matches(const Description& other) const {
  return kind == other.kind && reduction == other.reduction && root == other.root &&
         tensors == other.tensors && members == other.members &&
         on_gpu == other.on_gpu && HaveMatchingLabels(*this, other);
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
  if (name.size() <= kNameShown) return "'" + Printable(name) + "'";
  size_t head = kNameShown / 2;
  while (head > 0 && IsInsideCharacter(name[head])) --head;
  size_t tail = name.size() - kNameShown / 2;
  while (tail < name.size() && IsInsideCharacter(name[tail])) ++tail;
  std::string text = "'" + Printable(name.substr(0, head)) + "...";
  text += Printable(name.substr(tail));
  return text + "' (" + std::to_string(name.size()) + " bytes)";
}

std::string Title(Kind kind, std::string_view name) {
  if (IsAgreement(kind)) return std::string(Name(kind)) + "()";
  return std::string(Name(kind)) + " " + Quoted(name);
}

std::string Title(const Description& description) {
  return Title(description.kind, description.name);
}

std::string WhoGaveWhat(const std::vector<std::pair<int, std::string>>& given) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (const auto& [rank, what] : given) {
    auto same = std::find_if(groups.begin(), groups.end(), [&what = what](auto& group) {
      return group.first == what;
    });
    if (same == groups.end()) same = groups.insert(groups.end(), {what, {}});
    same->second.push_back(rank);
  }
  std::string text;
  for (const auto& [what, ranks] : groups) {
    text += (text.empty() ? "" : "; ") + RankList(ranks) + ": " + what;
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

std::string FirstDifference(const Description& description, const Description& other) {
  const std::vector<std::string_view> mine = Lines(description.labels);
  const std::vector<std::string_view> theirs = Lines(other.labels);
  if (mine.empty()) return "";
  const std::vector<TensorDescription>& tensors = description.tensors;
  for (size_t i = 0; i < std::max(mine.size(), theirs.size()); ++i) {
    const bool is_tensor = i < tensors.size();
    const bool is_same = i < mine.size() && i < theirs.size() &&
                         IsSameLabel(mine[i], theirs[i]) &&
                         is_tensor == (i < other.tensors.size()) &&
                         (!is_tensor || tensors[i] == other.tensors[i]);
    if (is_same) continue;
    if (i >= mine.size()) return ", which are all";
    if (!is_tensor) return ", with " + Quoted(mine[i]);
    return ", number " + std::to_string(i + 1) + " is " + Quoted(mine[i]) + " of " +
           TensorText(tensors[i], HasOwnRows(description.kind));
  }
  return "";
}

}  // namespace keras_hvd
