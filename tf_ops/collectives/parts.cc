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

std::vector<std::vector<Parts::Part>> LinesOf(
    const std::vector<std::vector<int64_t>>& starts) {
  std::vector<std::vector<Parts::Part>> lines(starts.front().size() - 1);
  for (size_t tensor = 0; tensor < starts.size(); ++tensor) {
    for (size_t member = 0; member < lines.size(); ++member) {
      const int64_t start = starts[tensor][member];
      lines[member].push_back({tensor, start, starts[tensor][member + 1] - start});
    }
  }
  return lines;
}

}  // namespace

std::vector<int64_t> PartStarts(int64_t count, int64_t bytes, int members) {
  std::vector<int64_t> starts;
  for (int member = 0; member <= members; ++member) {
    starts.push_back(PartStart(count, member, members) * bytes);
  }
  return starts;
}

Parts::Parts(std::vector<std::vector<Part>> lines) : lines_(std::move(lines)) {
  for (const std::vector<Part>& line : lines_) {
    std::vector<int64_t>& positions = positions_.emplace_back();
    int64_t position = 0;
    for (const Part& part : line) {
      positions.push_back(position);
      position += RoundUp(part.bytes);
    }
    positions.push_back(position);
    longest_line_ = std::max(longest_line_, position);
  }
}

Parts::Parts(const std::vector<std::vector<int64_t>>& starts)
    : Parts(LinesOf(starts)) {}

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
      const std::vector<Parts::Part>& line = parts.of(member);
      parts.ForEach(
          member, begin, begin + stretch,
          [&](size_t number, int64_t offset, int64_t position, int64_t bytes) {
            const Parts::Part& part = line[number];
            CopyOrdinary(
                to + position,
                static_cast<const char*>(tensors[part.tensor]) + part.start + offset,
                bytes);
          });
    }
    communicator->Publish();
    if (!communicator->AwaitAllPublished()) return false;
    communicator->Enter(CollectivePhase::kReduce);
    parts.ForEach(self, begin, begin + stretch,
                  [&](size_t number, int64_t offset, int64_t position, int64_t bytes) {
                    for (int member = 0; member < members; ++member) {
                      inputs[member] = communicator->ExchangeMemory(member) +
                                       self * stretch + position - begin;
                    }
                    const Parts::Part& part = parts.of(self)[number];
                    inputs[self] = static_cast<const char*>(tensors[part.tensor]) +
                                   part.start + offset;
                    visit(number, offset, bytes, inputs.data());
                  });
  }
  return true;
}

void PlaceOwnParts(const std::vector<Parts::Part>& parts,
                   const std::vector<const void*>& own,
                   const std::vector<void*>& tensors) {
  for (size_t number = 0; number < parts.size(); ++number) {
    const Parts::Part& part = parts[number];
    if (tensors[part.tensor] == nullptr) continue;
    char* to = static_cast<char*>(tensors[part.tensor]) + part.start;
    const char* from = static_cast<const char*>(own[number]);
    if (to != from) CopyOrdinary(to, from, part.bytes);
  }
}

bool GatherLines(const Parts& parts, Communicator* communicator,
                 const std::vector<void*>& tensors, const FillExchange& fill) {
  const int members = communicator->count();
  const int self = communicator->index();
  const int64_t window = communicator->window_bytes();
  for (int64_t begin = 0; begin < parts.longest_line(); begin += window) {
    if (begin > 0 && !communicator->NextRound()) return false;
    communicator->Enter(CollectivePhase::kCopyIn);
    if (!fill(communicator->ExchangeMemory(self) - begin, begin, begin + window)) {
      return false;
    }
    communicator->Publish();
    for (int step = 1; step < members; ++step) {
      const int member = (self + step) % members;
      if (!communicator->AwaitPublished(member)) return false;
      communicator->Enter(CollectivePhase::kCopyOut);
      const char* from = communicator->ExchangeMemory(member) - begin;
      const std::vector<Parts::Part>& line = parts.of(member);
      parts.ForEach(
          member, begin, begin + window,
          [&](size_t number, int64_t offset, int64_t position, int64_t bytes) {
            const Parts::Part& part = line[number];
            if (tensors[part.tensor] == nullptr) return;
            CopyOrdinary(static_cast<char*>(tensors[part.tensor]) + part.start + offset,
                         from + position, bytes);
          });
    }
  }
  return true;
}

bool Gather(const Parts& parts, const std::vector<const void*>& own,
            Communicator* communicator, const std::vector<void*>& tensors) {
  const int self = communicator->index();
  PlaceOwnParts(parts.of(self), own, tensors);
  if (communicator->count() == 1) return true;
  return GatherLines(
      parts, communicator, tensors, [&](char* exchange, int64_t begin, int64_t end) {
        parts.ForEach(
            self, begin, end,
            [&](size_t number, int64_t offset, int64_t position, int64_t bytes) {
              CopyOrdinary(exchange + position,
                           static_cast<const char*>(own[number]) + offset, bytes);
            });
        return true;
      });
}

}  // namespace keras_hvd
