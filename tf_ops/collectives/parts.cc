// See parts.h.
#include "tf_ops/collectives/parts.h"

#include <utility>

#include "tf_ops/collectives/copy.h"

namespace keras_hvd {
namespace {

// No element is larger or needs a greater alignment.
constexpr int64_t kElementBytes = 8;
// Smaller windows rewrite exchange memory lines that are still in the cache of the core
// that read them.
constexpr int64_t kScatterBytes = 1 << 20;

int64_t RoundUp(int64_t bytes) {
  return (bytes + kElementBytes - 1) / kElementBytes * kElementBytes;
}

}  // namespace

Parts::Parts(std::vector<std::vector<int64_t>> starts) : starts_(std::move(starts)) {
  const int members = static_cast<int>(starts_.front().size()) - 1;
  for (int member = 0; member < members; ++member) {
    std::vector<int64_t>& offsets = offsets_.emplace_back();
    int64_t position = 0;
    for (size_t tensor = 0; tensor < starts_.size(); ++tensor) {
      offsets.push_back(position);
      position += RoundUp(bytes(tensor, member));
    }
    offsets.push_back(position);
    longest_line_ = std::max(longest_line_, position);
  }
}

bool Scatter(const Parts& parts, const std::vector<const void*>& tensors,
             Communicator* communicator, const VisitStretch& visit) {
  const int members = communicator->count();
  const int self = communicator->index();
  // Each member's exchange memory has a stretch for every other member.
  const int64_t stretch = std::min(kScatterBytes, communicator->window_bytes()) /
                          members / kElementBytes * kElementBytes;
  std::vector<const void*> inputs(members);
  for (int64_t begin = 0; begin < parts.longest_line(); begin += stretch) {
    if (begin > 0 && !communicator->NextRound()) return false;
    communicator->Enter(CollectivePhase::kCopyIn);
    for (int step = 1; step < members; ++step) {
      const int member = (self + step) % members;
      char* to = communicator->ExchangeMemory(self) + member * stretch - begin;
      parts.ForEach(
          member, begin, begin + stretch,
          [&](size_t tensor, int64_t offset, int64_t position, int64_t bytes) {
            CopyOrdinary(to + position,
                         static_cast<const char*>(tensors[tensor]) +
                             parts.start(tensor, member) + offset,
                         bytes);
          });
    }
    communicator->Publish();
    if (!communicator->AwaitAllPublished()) return false;
    communicator->Enter(CollectivePhase::kReduce);
    parts.ForEach(self, begin, begin + stretch,
                  [&](size_t tensor, int64_t offset, int64_t position, int64_t bytes) {
                    for (int member = 0; member < members; ++member) {
                      inputs[member] = communicator->ExchangeMemory(member) +
                                       self * stretch + position - begin;
                    }
                    inputs[self] = static_cast<const char*>(tensors[tensor]) +
                                   parts.start(tensor, self) + offset;
                    visit(tensor, offset, bytes, inputs.data());
                  });
  }
  return true;
}

bool Gather(const Parts& parts, const std::vector<const void*>& own,
            Communicator* communicator, const std::vector<void*>& tensors) {
  const int members = communicator->count();
  const int self = communicator->index();
  const int64_t window = communicator->window_bytes();
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    if (tensors[tensor] == nullptr) continue;
    char* to = static_cast<char*>(tensors[tensor]) + parts.start(tensor, self);
    const char* from = static_cast<const char*>(own[tensor]);
    if (to != from) CopyOrdinary(to, from, parts.bytes(tensor, self));
  }
  if (members == 1) return true;
  for (int64_t begin = 0; begin < parts.longest_line(); begin += window) {
    if (begin > 0 && !communicator->NextRound()) return false;
    communicator->Enter(CollectivePhase::kCopyIn);
    char* exchange = communicator->ExchangeMemory(self) - begin;
    parts.ForEach(self, begin, begin + window,
                  [&](size_t tensor, int64_t offset, int64_t position, int64_t bytes) {
                    CopyOrdinary(exchange + position,
                                 static_cast<const char*>(own[tensor]) + offset, bytes);
                  });
    communicator->Publish();
    for (int step = 1; step < members; ++step) {
      const int member = (self + step) % members;
      if (!communicator->AwaitPublished(member)) return false;
      communicator->Enter(CollectivePhase::kCopyOut);
      const char* from = communicator->ExchangeMemory(member) - begin;
      parts.ForEach(
          member, begin, begin + window,
          [&](size_t tensor, int64_t offset, int64_t position, int64_t bytes) {
            if (tensors[tensor] == nullptr) return;
            CopyOrdinary(static_cast<char*>(tensors[tensor]) +
                             parts.start(tensor, member) + offset,
                         from + position, bytes);
          });
    }
  }
  return true;
}

}  // namespace keras_hvd
