// See alltoall.h.
#include "tf_ops/collectives/alltoall.h"

#include <algorithm>

#include "tf_ops/collectives/allgather_values.h"
#include "tf_ops/collectives/copy.h"

namespace keras_hvd {
namespace {

std::vector<int64_t> StartsOf(const std::vector<int64_t>& rows, int64_t row_bytes) {
  std::vector<int64_t> starts;
  int64_t start = 0;
  for (int64_t count : rows) {
    starts.push_back(start);
    start += count * row_bytes;
  }
  return starts;
}

}  // namespace

bool Alltoall(const AlltoallOptions& options, Communicator* communicator) {
  const int members = communicator->count();
  const int self = communicator->index();
  // The members' splits determine the number of rounds, the same for all.
  std::vector<std::vector<int64_t>> splits;
  if (!AllgatherValues(options.splits, communicator, &splits)) return false;
  std::vector<int64_t> received;
  int64_t longest = 0;
  for (int member = 0; member < members; ++member) {
    received.push_back(splits[member][self]);
    for (int peer = 0; peer < members; ++peer) {
      if (peer == member) continue;
      longest = std::max(longest, splits[member][peer] * options.row_bytes);
    }
  }
  char* result = static_cast<char*>(options.allocate(received));
  const char* input = static_cast<const char*>(options.input);
  const std::vector<int64_t> from = StartsOf(options.splits, options.row_bytes);
  const std::vector<int64_t> to = StartsOf(received, options.row_bytes);
  if (result != nullptr && received[self] > 0) {
    CopyOrdinary(result + to[self], input + from[self],
                 received[self] * options.row_bytes);
  }

  const int64_t window = communicator->window_bytes() / members;
  for (int64_t begin = 0; begin < longest; begin += window) {
    if (!communicator->NextRound()) return false;
    const auto part = [&](int64_t rows) {
      return std::clamp<int64_t>(rows * options.row_bytes - begin, 0, window);
    };
    communicator->Enter(CollectivePhase::kCopyIn);
    for (int step = 1; step < members; ++step) {
      const int member = (self + step) % members;
      const int64_t bytes = part(options.splits[member]);
      if (bytes == 0) continue;
      CopyOrdinary(communicator->ExchangeMemory(self) + member * window,
                   input + from[member] + begin, bytes);
    }
    communicator->Publish();
    for (int step = 1; step < members; ++step) {
      const int member = (self + step) % members;
      if (!communicator->AwaitPublished(member)) return false;
      communicator->Enter(CollectivePhase::kCopyOut);
      const int64_t bytes = part(received[member]);
      if (result == nullptr || bytes == 0) continue;
      CopyOrdinary(result + to[member] + begin,
                   communicator->ExchangeMemory(member) + self * window, bytes);
    }
  }
  return true;
}

}  // namespace keras_hvd
