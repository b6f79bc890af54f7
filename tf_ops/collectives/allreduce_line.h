// The tensors of an allreduce as one line of bytes, and its windows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tf_ops/collectives/allreduce.h"

namespace keras_hvd {

inline char* Output(const AllreduceTensor& tensor, int64_t offset) {
  return static_cast<char*>(tensor.output) + offset;
}

// A stretch of a tensor's data, at `position` in the line.
struct Stretch {
  const AllreduceTensor& tensor;
  int64_t offset, position, bytes;

  const char* input() const { return static_cast<const char*>(tensor.input) + offset; }
  char* output() const { return Output(tensor, offset); }
  int64_t elements() const { return bytes / Bytes(tensor.dtype); }
};

class Line {
 public:
  explicit Line(const std::vector<AllreduceTensor>& tensors) : tensors_(tensors) {
    starts_.reserve(tensors.size() + 1);
    int64_t start = 0;
    for (const AllreduceTensor& tensor : tensors) {
      starts_.push_back(start);
      start += PaddedBytes(tensor.elements * Bytes(tensor.dtype));
    }
    starts_.push_back(start);
  }

  int64_t bytes() const { return starts_.back(); }

  // Visits each stretch in [begin, end).
  template <typename Visit>
  void ForEach(int64_t begin, int64_t end, const Visit& visit) const {
    size_t i =
        std::upper_bound(starts_.begin(), starts_.end(), begin) - starts_.begin() - 1;
    for (; i < tensors_.size() && starts_[i] < end; ++i) {
      const AllreduceTensor& tensor = tensors_[i];
      const int64_t from = std::max(begin, starts_[i]);
      const int64_t data_end = starts_[i] + tensor.elements * Bytes(tensor.dtype);
      const int64_t to = std::min(end, data_end);
      if (from < to) visit(Stretch{tensor, from - starts_[i], from, to - from});
    }
  }

 private:
  const std::vector<AllreduceTensor>& tensors_;
  std::vector<int64_t> starts_;
};

// A stretch of the line and its place in the exchange memories.
struct Window {
  int64_t begin;
  int64_t end;

  int64_t Slice(int members) const {
    return PaddedBytes((end - begin + members - 1) / members);
  }
  Window Part(int member, int members) const {
    const int64_t slice = Slice(members);
    return {std::min(end, begin + member * slice),
            std::min(end, begin + (member + 1) * slice)};
  }
};

}  // namespace keras_hvd
