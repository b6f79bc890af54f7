#include "tf_ops/gpu/staging.h"

#include <utility>

namespace keras_hvd {
namespace {

// Sizes are powers of two, so memory taken for one tensor can serve the next.
constexpr size_t kLeastBytes = 4 << 10;

size_t Rounded(size_t bytes) {
  size_t rounded = kLeastBytes;
  while (rounded < bytes) rounded *= 2;
  return rounded;
}

}  // namespace

Status Staging::Take(const std::shared_ptr<cuda::Gpu>& gpu, cuda::Memory::Space space,
                     size_t bytes, cuda::Memory* memory) {
  const size_t rounded = Rounded(bytes);
  for (cuda::Memory& free : free_) {
    if (free.bytes() != rounded || free.space() != space) continue;
    *memory = std::move(free);
    free = std::move(free_.back());
    free_.pop_back();
    return Status::Ok();
  }
  return cuda::Memory::Allocate(gpu, space, rounded, memory);
}

void Staging::GiveBack(cuda::Memory memory) { free_.push_back(std::move(memory)); }

void Staging::Abandon() {
  for (cuda::Memory& memory : free_) memory.Abandon();
  free_.clear();
}

}  // namespace keras_hvd
