#include "tf_ops/collectives/alltoall.h"

#include <algorithm>
#include <numeric>

#include "tf_ops/collectives/allgather_values.h"
#include "tf_ops/collectives/copy.h"

namespace keras_hvd {
namespace {

// The bytes that this member gives to another one, and those that it gets from it.
struct Trade {
  const char* from;
  int64_t given;  // in bytes
  char* to;       // null if there is no memory
  int64_t taken;
};

// By member.
using Trades = std::vector<Trade>;

std::vector<int64_t> StartsOf(const std::vector<int64_t>& rows, int64_t row_bytes) {
  std::vector<int64_t> starts;
  int64_t start = 0;
  for (int64_t count : rows) {
    starts.push_back(start);
    start += count * row_bytes;
  }
  return starts;
}

// The most rows that one of these members gives to another.
int64_t LongestOf(const std::vector<std::vector<int64_t>>& splits,
                  const std::vector<int>& members) {
  int64_t longest = 0;
  for (int member : members) {
    for (int peer : members) {
      if (peer != member) longest = std::max(longest, splits[member][peer]);
    }
  }
  return longest;
}

// `longest` determines the number of rounds, the same for all.
bool Make(const Trades& trades, int64_t longest, Communicator* communicator) {
  const int members = communicator->count();
  const int self = communicator->index();
  const int64_t window = communicator->window_bytes() / members;
  for (int64_t begin = 0; begin < longest; begin += window) {
    if (!communicator->NextRound()) return false;
    const auto part = [&](int64_t bytes) {
      return std::clamp<int64_t>(bytes - begin, 0, window);
    };
    communicator->Enter(CollectivePhase::kCopyIn);
    for (int step = 1; step < members; ++step) {
      const int member = (self + step) % members;
      const int64_t bytes = part(trades[member].given);
      if (bytes == 0) continue;
      CopyOrdinary(communicator->ExchangeMemory(self) + member * window,
                   trades[member].from + begin, bytes);
    }
    communicator->Publish();
    for (int step = 1; step < members; ++step) {
      const int member = (self + step) % members;
      if (!communicator->AwaitPublished(member)) return false;
      communicator->Enter(CollectivePhase::kCopyOut);
      const int64_t bytes = part(trades[member].taken);
      if (trades[member].to == nullptr || bytes == 0) continue;
      CopyOrdinary(trades[member].to + begin,
                   communicator->ExchangeMemory(member) + self * window, bytes);
    }
  }
  return true;
}

bool MakeAll(const Trades& trades, const std::vector<std::vector<int64_t>>& splits,
             int64_t row_bytes, Communicator* communicator) {
  std::vector<int> members(communicator->count());
  std::iota(members.begin(), members.end(), 0);
  return Make(trades, LongestOf(splits, members) * row_bytes, communicator);
}

// Each two members on different hosts trade by themselves.
bool MakeAll(const Trades& trades, const std::vector<std::vector<int64_t>>& splits,
             int64_t row_bytes, HostsCommunicator* hosts) {
  for (int step = 1; step < hosts->hosts(); ++step) {
    for (int member : hosts->members_of(hosts->host_after(step))) {
      hosts->Send(member, trades[member].from, trades[member].given);
      hosts->Receive(member, trades[member].to, trades[member].taken);
    }
  }
  const std::vector<int>& here = hosts->members_of(hosts->host());
  Trades local;
  for (int member : here) local.push_back(trades[member]);
  return Make(local, LongestOf(splits, here) * row_bytes, &hosts->local()) &&
         hosts->AwaitReceived() && hosts->AwaitSent();
}

}  // namespace

template <typename Group>
bool Alltoall(const AlltoallOptions& options, Group* communicator) {
  const int members = communicator->count();
  const int self = communicator->index();
  std::vector<std::vector<int64_t>> splits;
  if (!AllgatherValues(options.splits, communicator, &splits)) return false;
  std::vector<int64_t> received;
  for (int member = 0; member < members; ++member) {
    received.push_back(splits[member][self]);
  }
  char* result = static_cast<char*>(options.allocate(received));
  const char* input = static_cast<const char*>(options.input);
  const std::vector<int64_t> from = StartsOf(options.splits, options.row_bytes);
  const std::vector<int64_t> to = StartsOf(received, options.row_bytes);
  Trades trades;
  for (int member = 0; member < members; ++member) {
    trades.push_back({input + from[member], options.splits[member] * options.row_bytes,
                      result == nullptr ? nullptr : result + to[member],
                      received[member] * options.row_bytes});
  }
  if (result != nullptr) {
    CopyOrdinary(trades[self].to, trades[self].from, trades[self].given);
  }
  return MakeAll(trades, splits, options.row_bytes, communicator);
}

template bool Alltoall(const AlltoallOptions&, Communicator*);
template bool Alltoall(const AlltoallOptions&, HostsCommunicator*);

}  // namespace keras_hvd
